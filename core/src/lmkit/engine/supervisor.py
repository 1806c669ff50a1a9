"""ProcessClient: starts the engine process, watches it, and says in words why it ended. Supervised: replaces it then.

Crash-only: a failed engine is never repaired, its streams end with EngineDead and its state is "dead".
"""

from __future__ import annotations

import asyncio
import logging
import signal
import subprocess
from collections.abc import Callable, Iterable
from time import perf_counter

import msgspec

from lmkit.api import (
    Checkpoint,
    EngineDead,
    EngineError,
    EngineRequest,
    ErrorInfo,
    LmkitError,
    Progress,
    ResolvedPlan,
)
from lmkit.config import EngineConfig
from lmkit.engine.messages import (
    AskStats,
    Command,
    EngineFacts,
    EngineStats,
    Report,
    Splitter,
    Stop,
    decode_report,
    encode,
)
from lmkit.engine.observers import Observers
from lmkit.engine.spawn import FACTORY, EngineProcess
from lmkit.engine.streams import BaseClient, EventStream, State

log = logging.getLogger("lmkit.engine")

STOP_SECONDS = 5.0  # for a stopped engine to end by itself
STALL_SECONDS = 300.0  # of silence while requests run: the engine hangs; longer than any single step
RESTARTS = 5  # in a row
FIRST_PAUSE, LAST_PAUSE = 0.5, 30.0  # seconds before a dead engine is replaced
HEALTHY_SECONDS = 600.0  # an engine that lived so long was no failed try
REAP_SECONDS = 0.5  # to learn the exit status of a child whose socket closed


class _Wire(asyncio.Protocol):
    """The parent's end of the socket: bytes to reports."""

    def __init__(self, client: ProcessClient) -> None:
        self._client = client
        self._splitter = Splitter()

    def data_received(self, data: bytes) -> None:
        try:
            reports = [decode_report(payload) for payload in self._splitter.feed(data)]
        except (EngineError, msgspec.DecodeError) as error:
            self._client.lost(f"the engine sent what cannot be read: {error}")
            return
        for report in reports:
            self._client.received(report)

    def connection_lost(self, exc: Exception | None) -> None:
        self._client.lost()


class Supervised:
    """An EngineClient that replaces a dead engine by a new one. The requests of the dead one have ended with errors.

    A new engine starts after a pause that doubles from try to try; `restarts` tries without an engine that lives for
    HEALTHY_SECONDS are the last. Every client that `make` returns is used once.
    """

    def __init__(
        self,
        make: Callable[[], BaseClient],
        restarts: int = RESTARTS,
        pause: float = FIRST_PAUSE,
        first: BaseClient | None = None,
    ) -> None:
        """`first`: the one to begin with, if it is not of `make`."""
        self._make, self._restarts, self._pause = make, restarts, pause
        self._client = first or make()
        self._dead = asyncio.Event()
        self._guard: asyncio.Task[None] | None = None
        self._observers: Observers | None = None
        self._first_facts: EngineFacts | None = None
        self._adapters: dict[str, str | None] = {}  # set while it ran; a successor gets them too

    @property
    def client(self) -> BaseClient:
        """The engine of the moment."""
        return self._client

    @property
    def state(self) -> State:
        return self._client.state

    @property
    def failure(self) -> ErrorInfo | None:
        return self._client.failure

    @property
    def ended(self) -> bool:
        return self.state == "dead" and self._guard is not None and self._guard.done()

    @property
    def facts(self) -> EngineFacts:
        """Of the first engine: its successors are built from the same plan."""
        return self._first_facts or self._client.facts

    @property
    def observers(self) -> Observers | None:
        return self._observers

    @observers.setter
    def observers(self, value: Observers | None) -> None:
        self._observers = self._client.observers = value

    async def start(self) -> None:
        """Raises what prevents the first engine from starting."""
        self._client.on_death = self._dead.set
        await self._client.start()
        self._first_facts = self._client.facts
        self._guard = asyncio.ensure_future(self._replace_the_dead())

    async def _replace_the_dead(self) -> None:
        left, pause, born = self._restarts, self._pause, perf_counter()
        while True:
            await self._dead.wait()
            self._dead.clear()
            if perf_counter() - born > HEALTHY_SECONDS:
                left, pause = self._restarts, self._pause
            if left == 0:
                log.error("the engine died too often and is not started again: %s", self._reason())
                return
            log.warning("the engine is started again in %.1f s: %s", pause, self._reason())
            await self._client.close()
            await asyncio.sleep(pause)
            left, pause = left - 1, min(2 * pause, LAST_PAUSE)
            self._client = self._make()
            self._client.observers = self._observers
            try:
                await self._client.start()
            except LmkitError as error:
                log.error("the engine did not start again: %s", error)
                self._dead.set()
                continue
            for name, path in self._adapters.items():
                try:
                    await self._client.set_adapter(name, path)
                except LmkitError as error:
                    log.error("adapter %s: %s", name, error)
            born = perf_counter()
            self._client.on_death = self._dead.set
            if self._client.state == "dead":  # between its start and the line above
                self._dead.set()

    def _reason(self) -> str:
        return self._client.failure.message if self._client.failure else "unknown"

    def submit(self, request: EngineRequest) -> EventStream:
        return self._client.submit(request)

    def abort(self, ids: Iterable[str]) -> None:
        self._client.abort(ids)

    async def stats(self) -> EngineStats:
        return await self._client.stats()

    async def set_adapter(self, name: str, path: str | None) -> None:
        await self._client.set_adapter(name, path)
        self._adapters[name] = path

    def drain(self) -> None:
        """Also: a dead engine is not replaced any more."""
        self._stop_guarding()
        self._client.drain()

    async def close(self) -> None:
        self._stop_guarding()
        if self._guard is not None:
            await asyncio.gather(self._guard, return_exceptions=True)
        await self._client.close()

    def _stop_guarding(self) -> None:
        if self._guard is not None:
            self._guard.cancel()


class ProcessClient(BaseClient):
    """An engine in its own process. `factory` ("package.module:Attr") assembles it there.

    `process`: one that was started ahead and has its order; None: `start` starts one.
    """

    def __init__(
        self,
        config: EngineConfig,
        resolved: ResolvedPlan,
        checkpoint: Checkpoint,
        progress: Progress | None = None,
        *,
        factory: str = FACTORY,
        stall_seconds: float = STALL_SECONDS,
        process: EngineProcess | None = None,
    ) -> None:
        super().__init__(progress)
        self._stall_seconds = stall_seconds
        self._heard = perf_counter()  # when the last report came
        self._watching: asyncio.Task[None] | None = None
        self._order = config, resolved, checkpoint, factory
        self._engine = process
        self._transport: asyncio.Transport | None = None
        self._ending: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int | None:
        """Process id of the engine."""
        return self._engine.process.pid if self._engine else None

    async def start(self) -> None:
        """Raises what stopped the engine from starting, with its own type, or EngineDead."""
        loop = asyncio.get_running_loop()
        self._started = loop.create_future()
        try:
            if self._engine is None:
                self._engine = EngineProcess()
                self._engine.order(*self._order)
            transport, _ = await loop.connect_accepted_socket(lambda: _Wire(self), self._engine.socket)
            self._transport = transport
            await self._started
        except BaseException:
            await self.close()
            raise
        self._watching = asyncio.ensure_future(self._watch())
        rest = perf_counter() - self._engine.ordered - sum(seconds for _, seconds in self.facts.phases)
        phases = (("start process", max(0.0, rest)), *self.facts.phases)
        self.facts = msgspec.structs.replace(self.facts, phases=phases)

    @property
    def _process(self) -> subprocess.Popen[bytes]:
        assert self._engine is not None
        return self._engine.process

    def _send(self, command: Command) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(encode(command))

    def received(self, report: Report) -> None:
        self._heard = perf_counter()
        self._receive(report)

    async def _watch(self) -> None:
        """Ends an engine that owes an answer and says nothing. A living one answers between two steps."""
        interval, owed_since = self._stall_seconds / 4, None
        while not self._over:
            await asyncio.sleep(interval)
            now = perf_counter()
            if not (self._streams or self._asked):
                owed_since = None
                continue
            owed_since = owed_since or now
            if now - max(self._heard, owed_since) > self._stall_seconds:
                self._process.send_signal(signal.SIGABRT)  # it prints the stacks of all its threads
                self.lost(f"made no progress for {self._stall_seconds:g} s")
                return
            self._send(AskStats(0))  # nobody waits for number 0

    def lost(self, why: str = "") -> None:
        """The connection is gone or useless: dead at once, in words as soon as the exit status is known."""
        if self._ending is None and not self._over:
            self.state = "dead"
            self._ending = asyncio.ensure_future(self._end(why))

    async def _end(self, why: str) -> None:
        for _ in range(int(REAP_SECONDS / 0.01)):
            if self._process.poll() is not None:
                break
            await asyncio.sleep(0.01)
        how = why or _how(self._process.poll())
        self._die(EngineDead(f"the engine process {how}", fix=_advice(self._process)).info())

    def _die(self, error: ErrorInfo | None) -> None:
        super()._die(error)
        if error is not None and self._engine is not None and self._process.poll() is None:
            self._process.kill()  # it reported its failure; crash-only

    async def close(self) -> None:
        """Stop, wait, then kill. Idempotent."""
        self._die(None)
        if self._engine is None:
            return
        if not self._was_ready:
            self._process.kill()  # it would load its weights to the end before it listens
        self._send(Stop())
        try:
            await asyncio.to_thread(self._process.wait, STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            await asyncio.to_thread(self._process.wait)
        if self._transport is not None:
            self._transport.close()
        self._engine.socket.close()
        if self._watching is not None:
            self._watching.cancel()


def _how(status: int | None) -> str:
    if status is None:
        return "closed its connection"
    if status < 0:
        try:
            name = signal.Signals(-status).name
        except ValueError:
            name = str(-status)
        return f"was killed by signal {name}"
    return f"ended with status {status}"


def _advice(process: subprocess.Popen[bytes]) -> str:
    if process.poll() == -signal.SIGKILL:
        return "the system may have run out of memory: see the kernel log; use a smaller --kv-memory or --max-length"
    return "its log has the details; start it again"

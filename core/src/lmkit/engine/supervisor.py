"""ProcessClient: starts the engine process, watches it, and says in words why it ended. Supervised: replaces it then.

Crash-only: a failed engine is never repaired, its streams end with EngineDead and its state is "dead".
"""

from __future__ import annotations

import asyncio
import logging
import signal
import subprocess
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
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
    TokenEvent,
)
from lmkit.config import EngineConfig
from lmkit.engine.messages import (
    AskStats,
    Command,
    EngineFacts,
    EngineStats,
    Events,
    Larger,
    Report,
    Splitter,
    Stats,
    Stop,
    decode_report,
    encode,
)
from lmkit.engine.observers import Observers
from lmkit.engine.spawn import FACTORY, EngineProcess
from lmkit.engine.streams import BaseClient, EventStream, State
from lmkit.engine.suspects import HEALTHY_SECONDS, Suspects

log = logging.getLogger("lmkit.engine")

STOP_SECONDS = 5.0  # for a stopped engine to end by itself
STALL_SECONDS = 10.0  # of silence, at least: the engine hangs
STALL_STEPS = 10  # times the longest answer so far is a hang, too
FIRST_SECONDS = 300.0  # for a first step, or one larger than any before: nobody knows how long it takes
LOOK_SECONDS = 0.25  # between looks at the engine
PROMPT_SECONDS = 1.0  # in which an engine answers that is fine, or in LATE_STEPS times its longest answer so far
LATE_STEPS = 3
RESTARTS = 5  # in a row
FIRST_PAUSE, LAST_PAUSE = 0.5, 30.0  # seconds before a dead engine is replaced
TRY_TOKENS = 4  # beyond that point: a death may come a little later than last time
TRY_SECONDS = 5.0  # for a request under suspicion to get beyond the point where an engine died
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
    """An EngineClient that replaces a dead engine by a new one, which goes on with the requests that are to be resumed.

    Requests that ran at a death are under suspicion: the new engine gets them one at a time, while new ones wait, until
    each is beyond the point where the old one died. If an engine dies meanwhile, that one was it, and is refused.

    A new engine starts after a pause that doubles from try to try; `restarts` tries in a row, of which nobody was found
    to be the cause and none lived for HEALTHY_SECONDS, are the last. Every client that `make` returns is used once.
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
        self._up = False  # the engine of the moment is complete
        self._guard: asyncio.Task[None] | None = None
        self._observers: Observers | None = None
        self._first_facts: EngineFacts | None = None
        self._adapters: dict[str, str | None] = {}  # set while it ran; a successor gets them too
        self._suspects = Suspects()
        self._running: list[EventStream] = []  # at the death of the moment
        self._orphans: list[EventStream] = []  # of them, those to be resumed
        self._queue: deque[EventStream] = deque()  # to be tried one at a time
        self._held: list[EventStream] = []  # to be sent when all of these have been
        self._alone: EventStream | None = None  # being tried
        self._trying: asyncio.Task[None] | None = None
        self._explained = False  # the cause of the last death is known

    @property
    def client(self) -> BaseClient:
        """The engine of the moment."""
        return self._client

    @property
    def state(self) -> State:
        state = self._client.state
        return "starting" if state == "ready" and not self._up else state

    @property
    def responsive(self) -> bool:
        return self._client.responsive

    @property
    def failure(self) -> ErrorInfo | None:
        return self._client.failure

    @property
    def ended(self) -> bool:
        return self.state == "dead" and self._guard is not None and self._guard.done()

    @property
    def facts(self) -> EngineFacts:
        """Those of the first engine: its successors are built from the same plan."""
        return self._first_facts or self._client.facts

    @property
    def observers(self) -> Observers | None:
        return self._observers

    @observers.setter
    def observers(self, value: Observers | None) -> None:
        self._observers = self._client.observers = value

    async def start(self) -> None:
        """Raises what prevents the first engine from starting."""
        self._watch_over(self._client)
        await self._client.start()
        self._first_facts, self._up = self._client.facts, True
        self._guard = asyncio.ensure_future(self._replace_the_dead())

    def _watch_over(self, client: BaseClient) -> None:
        client.on_orphan, client.on_death = self._orphan, self._died

    def _orphan(self, stream: EventStream, error: ErrorInfo) -> bool:
        """A stream that an engine left behind. True: it is resumed."""
        self._running.append(stream)
        if not stream.request.resume or self._guard is None or self._guard.done():
            return False
        stream.owner = self
        self._orphans.append(stream)
        return True

    def _died(self) -> None:
        self._up = False
        running, self._running = self._running, []
        begun = [stream for stream in running if stream.num_tokens]
        fresh = [stream for stream in running if not stream.num_tokens]
        guilty = self._suspects.blame(
            [*begun, *fresh[: self.facts.max_rows or len(fresh)]], self._alone, self._client.killed
        )
        self._explained = bool(guilty)
        for stream in self._orphans:
            if stream in guilty:
                refusal = self._suspects.refusal(stream.request)
                stream.put(TokenEvent(stream.id, finish="error", error=refusal))
            else:
                self._enqueue(stream)
        self._orphans, self._alone = [], None
        self._dead.set()

    def _enqueue(self, stream: EventStream) -> None:
        if self._suspects.point(stream.request) is None:
            self._held.append(stream)
        else:
            self._queue.append(stream)

    async def _replace_the_dead(self) -> None:
        left, pause, born = self._restarts, self._pause, perf_counter()
        while True:
            await self._dead.wait()
            self._dead.clear()
            if self._explained or perf_counter() - born > HEALTHY_SECONDS:
                left, pause = self._restarts, self._pause
            if left == 0:
                log.error("the engine died too often and is not started again: %s", self._reason())
                self._end_waiting(self.failure or EngineDead("the engine is gone").info())
                return
            log.warning("the engine is started again in %.1f s: %s", pause, self._reason())
            await self._client.close()
            await asyncio.sleep(pause)
            left, pause = left - 1, min(2 * pause, LAST_PAUSE)
            self._explained = False
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
            if self._client.state == "dead":  # since its start
                self._dead.set()
                continue
            self._watch_over(self._client)
            self._up = True
            self._try_them()

    def _try_them(self) -> None:
        if self._trying is None or self._trying.done():
            self._trying = asyncio.ensure_future(self._try_one_by_one())

    async def _try_one_by_one(self) -> None:
        while self._up and self._queue:
            stream = self._queue.popleft()
            point = self._suspects.point(stream.request)
            if stream.ended:
                continue
            self._alone, stream.moved = stream, asyncio.Event()
            self._client.adopt(stream)
            with suppress(TimeoutError):
                async with asyncio.timeout(TRY_SECONDS):
                    while self._up and not stream.ended and stream.num_tokens <= (point or 0) + TRY_TOKENS:
                        await stream.moved.wait()
                        stream.moved.clear()
                    if self._up:
                        self._suspects.clear(stream.request)
            stream.moved = self._alone = None
        if self._up:
            held, self._held = self._held, []
            for stream in held:
                if not stream.ended:
                    self._client.adopt(stream)

    def _end_waiting(self, error: ErrorInfo) -> None:
        waiting = [*self._queue, *self._held]
        self._queue.clear()
        self._held.clear()
        for stream in waiting:
            if not stream.ended:
                stream.put(TokenEvent(stream.id, finish="error", error=error))

    def _reason(self) -> str:
        return self._client.failure.message if self._client.failure else "unknown"

    def submit(self, request: EngineRequest) -> EventStream:
        refusal = self._suspects.refusal(request)
        suspected = self._suspects.point(request) is not None
        if refusal is None and (not self._up or not (suspected or self._queue or self._alone)):
            return self._client.submit(request)
        stream = EventStream(self, request, self._observers.watch(request) if self._observers else None)
        if refusal is not None:
            stream.put(TokenEvent(request.id, finish="error", error=refusal))
            return stream
        self._enqueue(stream)
        self._try_them()
        return stream

    def abort(self, ids: Iterable[str]) -> None:
        ids = set(ids)
        for stream in [*self._queue, *self._held]:
            if stream.id in ids and not stream.ended:
                stream.put(TokenEvent(stream.id, finish="abort"))
        self._held = [stream for stream in self._held if not stream.ended]
        self._client.abort(ids)

    async def stats(self) -> EngineStats:
        return await self._client.stats()

    async def set_adapter(self, name: str, path: str | None) -> None:
        await self._client.set_adapter(name, path)
        self._adapters[name] = path

    async def profile(self, path: str, num_steps: int) -> None:
        await self._client.profile(path, num_steps)

    def drain(self) -> None:
        """Also: a dead engine is not replaced any more."""
        self._stop_guarding()
        if not self._up:
            self._end_waiting(EngineDead("the engine was closed").info())
        self._client.drain()

    async def close(self) -> None:
        self._stop_guarding()
        tasks = [task for task in (self._guard, self._trying) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._up = False
        await self._client.close()
        self._end_waiting(EngineDead("the engine was closed").info())

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
        first_seconds: float = FIRST_SECONDS,
        process: EngineProcess | None = None,
    ) -> None:
        super().__init__(progress)
        self._stall_seconds, self._first_seconds = stall_seconds, first_seconds
        self._asked_at: float | None = None  # when it was asked for a sign of life; None: it has answered
        self._longest = 0.0  # seconds that an answer took, a step usually
        self._unknown = True  # nothing tells how long the step of the moment takes
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
        now = perf_counter()
        match report:
            case Larger():
                self._unknown = True
            case Events() | Stats(0) if self._asked_at is not None:
                self._longest = max(self._longest, now - self._asked_at)
                self._asked_at = None
        self._unknown = self._unknown and not isinstance(report, Events)
        self._heard = now
        self._receive(report)

    @property
    def _silent(self) -> float:
        """Seconds for which it owes an answer."""
        return 0.0 if self._asked_at is None else perf_counter() - max(self._heard, self._asked_at)

    @property
    def responsive(self) -> bool:
        usual = STALL_SECONDS if self._unknown and self._streams else LATE_STEPS * self._longest
        return self._silent < max(PROMPT_SECONDS, usual)

    async def _watch(self) -> None:
        """Ends an engine that says nothing. A living one answers between two steps, or at once when it has none."""
        pause = min(LOOK_SECONDS, self._stall_seconds / 4)
        looked = perf_counter()
        while not self._over:
            await asyncio.sleep(pause)
            now, before = perf_counter(), looked
            looked = now
            if self._asked_at is None:
                self._asked_at = now
                self._send(AskStats(0))  # nobody waits for number 0
            if now - before > 2 * pause + 0.5:
                continue  # this process stood still itself: answers may be waiting to be read
            limit = max(self._stall_seconds, STALL_STEPS * self._longest)
            if self._unknown and self._streams:
                limit = max(limit, self._first_seconds)
            if self._silent > limit:
                self._process.send_signal(signal.SIGABRT)  # it prints the stacks of all its threads
                self.lost(f"made no progress for {self._silent:.1f} s")
                return

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
        self.killed = not why and self._process.poll() == -signal.SIGKILL
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

"""ProcessClient: starts the engine process, watches it, and says in words why it ended.

Crash-only: a failed engine is never repaired, its streams end with EngineDead and its state is "dead".
"""

from __future__ import annotations

import asyncio
import logging
import signal
import subprocess
from time import perf_counter

import msgspec

from lmkit.api import Checkpoint, EngineDead, EngineError, ErrorInfo, Progress, ResolvedPlan
from lmkit.config import EngineConfig
from lmkit.engine.messages import (
    AskStats,
    Command,
    Done,
    Events,
    Larger,
    Report,
    Splitter,
    Stats,
    Stop,
    decode_report,
    encode,
)
from lmkit.engine.spawn import FACTORY, EngineProcess
from lmkit.engine.streams import BaseClient

log = logging.getLogger("lmkit.engine")

STOP_SECONDS = 5.0  # for a stopped engine to end by itself
STALL_SECONDS = 10.0  # of silence, at least: the engine hangs
STALL_STEPS = 10  # times the longest answer so far is a hang, too
FIRST_SECONDS = 300.0  # for a first step, or one larger than any before: nobody knows how long it takes
LOOK_SECONDS = 0.25  # between looks at the engine
PROMPT_SECONDS = 1.0  # in which an engine answers that is fine, or in LATE_STEPS times its longest answer so far
LATE_STEPS = 3
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
            case Done():
                self._asked_at = None  # what it took says nothing of steps
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
        usual = STALL_SECONDS if self._num_changes or (self._unknown and self._streams) else LATE_STEPS * self._longest
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
            if self._num_changes or (self._unknown and self._streams):
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
        how = why or how_ended(self._process.poll())
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


def how_ended(status: int | None) -> str:
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

"""The engine thread: commands in, one report per step out. The same loop in a thread and in a process."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any, Protocol

from lmkit.api import (
    CheckpointError,
    EngineDead,
    EngineError,
    EngineRequest,
    ErrorInfo,
    LmkitError,
    RequestError,
    SchedStats,
    TokenEvent,
)
from lmkit.engine.adapters import Adapters
from lmkit.engine.life import Life
from lmkit.engine.messages import (
    Abort,
    AskStats,
    Command,
    Do,
    Done,
    EngineFacts,
    EngineStats,
    Events,
    Failed,
    Larger,
    Report,
    SetAdapter,
    Stats,
    Stop,
    Submit,
    info_of,
)

log = logging.getLogger("lmkit.engine")

LARGE = 1 << 20  # bytes of vectors that are sent by themselves
GATE_POLL = 0.001  # seconds between looks at gates when nothing else can be done


class Core(Protocol):
    """What the loop needs of engine.core.EngineCore."""

    def add(self, request: EngineRequest) -> None: ...
    def abort(self, ids: Iterable[str]) -> None: ...

    on_larger: Callable[[], None]
    num_compiled: int

    def step(self) -> list[TokenEvent]: ...
    def has_work(self) -> bool: ...
    def work_ahead(self) -> bool: ...

    @property
    def blocked(self) -> bool:
        """The last step had nothing to run: all requests wait for gates."""

    def stats(self) -> SchedStats: ...

    @property
    def adapters(self) -> Adapters: ...
    @property
    def life(self) -> Life: ...


@dataclass(slots=True)
class Engine:
    """An assembled engine: the step loop's core, what front ends must know, and how to end it."""

    core: Core
    facts: EngineFacts
    close: Callable[[], None] = field(default=lambda: None)  # idempotent


@dataclass(frozen=True, slots=True)
class Prepared:
    """An adapter that was read beside the loop, or why it was not."""

    number: int
    name: str
    error: ErrorInfo | None
    found: tuple[str, str] | None  # path, digest


class EngineLoop:
    """Runs an engine until `Stop` or a failure. `post` may be called from any thread, `run` from one."""

    def __init__(
        self, engine: Engine, emit: Callable[[Report], None], inbox: SimpleQueue[Command] | None = None
    ) -> None:
        self._core = engine.core
        self._emit = emit
        self._inbox: SimpleQueue[Any] = inbox or SimpleQueue()  # of Command and Prepared
        self._reader: SimpleQueue[tuple[int, str, str]] | None = None  # adapters to read; None: nobody asked yet
        self._running = True

    def post(self, command: Command) -> None:
        self._inbox.put(command)

    def run(self) -> bool:
        """True after `Stop`; False when the engine failed, which was then reported as `Failed`."""
        core, emit = self._core, self._emit
        core.on_larger = lambda: emit(Larger())
        try:
            while self._running:
                self._apply_commands(self._patience())
                if not self._running or not core.has_work():
                    continue
                for part in _portions(core.step()):
                    emit(Events(part))
        except Exception as error:  # crash-only: nothing is known about the state any more
            _log_crash(error)
            emit(Failed(_told(error)))
            return False
        return True

    def _patience(self) -> float | None:
        """How long to wait for a command: not at all while there is something to do; None: for ever."""
        if self._core.has_work():
            return GATE_POLL if self._core.blocked else 0.0
        return 0.0 if not self._inbox.empty() or self._core.work_ahead() else None

    def _apply_commands(self, wait: float | None) -> None:
        """Applies what has arrived; waits up to `wait` seconds (None: for ever) for the first command."""
        try:
            command = self._inbox.get(timeout=wait) if wait != 0.0 else self._inbox.get_nowait()
            while True:
                self._apply(command)
                command = self._inbox.get_nowait()
        except Empty:
            return

    def _apply(self, command: Command | Prepared) -> None:
        match command:
            case Submit(request):
                try:
                    self._core.add(request)
                except Exception as error:  # this request is wrong; the engine is not
                    self._emit(Events([TokenEvent(request.id, finish="error", error=_told(error, "a request"))]))
            case Abort(ids):
                self._core.abort(ids)
            case AskStats(number):
                self._emit(Stats(number, self.stats()))
            case Do(number, SetAdapter(name, path)):
                self._set_adapter(number, name, path)
            case Do(number, act) if not isinstance(act, SetAdapter):
                self._emit(Done(number, self._try(lambda: self._core.life.apply(act), "a change")))
            case Prepared(number, name, error) if error is not None:
                self._emit(Done(number, error))
            case Prepared(number, name, _, found):
                assert found is not None
                self._emit(Done(number, self._try(lambda: self._core.adapters.publish(name, *found))))
            case Stop():
                self._running = False

    def _set_adapter(self, number: int, name: str, path: str | None) -> None:
        """Files are read in a thread of their own: the steps go on."""
        if path is None:
            self._emit(Done(number, self._try(lambda: self._core.adapters.unload(name))))
            return
        if self._reader is None:
            self._reader = SimpleQueue()
            Thread(target=self._read, args=(self._reader,), name="lmkit-adapters", daemon=True).start()
        self._reader.put((number, name, path))

    def _read(self, wanted: SimpleQueue[tuple[int, str, str]]) -> None:
        while True:
            number, name, path = wanted.get()
            found: list[tuple[str, str]] = []
            error = self._try(lambda: found.append(self._core.adapters.prepare(name, path)))  # noqa: B023 (called here)
            self._inbox.put(Prepared(number, name, error, found[0] if found else None))

    def _try(self, change: Callable[[], object], what: str = "an adapter") -> ErrorInfo | None:
        """What a client hears of a change: an adapter, or weights, that are wrong are an error of the request."""
        try:
            change()
        except CheckpointError as error:
            return RequestError(error.message, fix=error.fix).info()
        except Exception as error:
            return _told(error, what)
        return None

    def stats(self) -> EngineStats:
        return EngineStats(self._core.stats(), self._core.num_compiled, self._core.life.state)


def _portions(events: list[TokenEvent]) -> Iterator[list[TokenEvent]]:
    """Events that fit one frame together: vectors of many tokens go by themselves."""
    large = [e for e in events if e.pooled is not None and len(e.pooled.data) > LARGE]
    small = [e for e in events if e.pooled is None or len(e.pooled.data) <= LARGE] if large else events
    if small:
        yield small
    for event in large:
        yield [event]


def _told(error: Exception, what: str = "") -> ErrorInfo:
    """What clients hear. The text of an untyped error may hold paths and addresses.

    `what` failed, if it is not the engine.
    """
    if isinstance(error, (LmkitError, MemoryError)):
        return info_of(error)
    kind, fix = type(error).__name__, "the engine's log has the cause"
    if what:
        log.error("%s failed", what, exc_info=error)
        return EngineError(f"{what} failed: {kind}", fix=fix).info()
    return EngineDead(f"{kind} in the engine", fix=f"{fix}; start it again").info()


def _log_crash(error: Exception) -> None:
    """The stack trace goes to the log of the engine; clients get the sentence only."""
    log.error("the engine failed", exc_info=error)

"""EngineClient: how front ends talk to an engine. `InprocClient` runs it in a thread, `ProcessClient` in a process.

Every submitted request yields exactly one finishing event, also when it is aborted and when the engine dies.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from threading import Thread
from typing import Protocol

from lmkit.api import EngineRequest, ErrorInfo, Progress, TokenEvent
from lmkit.engine.loop import Engine, EngineLoop
from lmkit.engine.messages import (
    Command,
    EngineFacts,
    EngineStats,
    Failed,
    Phase,
    Ready,
    Report,
    Stop,
    info_of,
)
from lmkit.engine.streams import BaseClient, EventStream, State
from lmkit.engine.supervisor import ProcessClient

__all__ = ["BaseClient", "EngineClient", "EventStream", "InprocClient", "ProcessClient", "State"]


class EngineClient(Protocol):
    """What a front end may use. All methods are called from one event loop."""

    @property
    def state(self) -> State: ...

    @property
    def failure(self) -> ErrorInfo | None:
        """Why the state is "dead", unless it was closed."""
        ...

    @property
    def ended(self) -> bool:
        """The state is "dead" and will stay so."""
        ...

    @property
    def responsive(self) -> bool:
        """Whether the engine answers in the time that it usually takes. One that does not may be a dead one soon."""
        ...

    @property
    def facts(self) -> EngineFacts:
        """From start() on."""
        ...

    async def start(self) -> None:
        """Returns when the engine is ready; raises what prevented that, typed."""
        ...

    def submit(self, request: EngineRequest) -> AsyncIterator[TokenEvent]: ...
    def abort(self, ids: Iterable[str]) -> None:
        """Ends streams with finish="abort" and frees their blocks. Idempotent; unknown ids are ignored."""
        ...

    async def stats(self) -> EngineStats: ...
    async def set_adapter(self, name: str, path: str | None) -> None:
        """Loads the adapter at `path` as `name`, or forgets `name`. Raises what prevents it."""
        ...

    def drain(self) -> None:
        """Refuse new requests (EngineBusy); running ones go on."""
        ...

    async def close(self) -> None:
        """Idempotent. Running requests end with an error event."""
        ...


class InprocClient(BaseClient):
    """An engine in a thread of this process. `make` assembles it there."""

    def __init__(self, make: Callable[[Progress | None], Engine], progress: Progress | None = None) -> None:
        super().__init__(progress)
        self._make = make
        self._loop: EngineLoop | None = None
        self._thread: Thread | None = None

    async def start(self) -> None:
        home = asyncio.get_running_loop()
        self._started = home.create_future()
        self._thread = Thread(target=self._work, args=(home,), name="lmkit-engine", daemon=True)
        self._thread.start()
        await self._started

    def _work(self, home: asyncio.AbstractEventLoop) -> None:
        def emit(report: Report) -> None:
            if not home.is_closed():
                home.call_soon_threadsafe(self._receive, report)

        try:
            engine = self._make(lambda phase, done, total, unit="B": emit(Phase(phase, done, total, unit)))
        except Exception as error:
            emit(Failed(info_of(error)))
            return
        try:
            self._loop = EngineLoop(engine, emit)
            emit(Ready(engine.facts))
            self._loop.run()
        finally:
            engine.close()

    def _send(self, command: Command) -> None:
        if self._loop is not None:
            self._loop.post(command)

    async def close(self) -> None:
        self._die(None)
        self._send(Stop())
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join)

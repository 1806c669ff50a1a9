"""InprocClient: an engine in a thread of the test's process, so that tests can look inside."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from threading import Thread

from lmkit.api import Progress
from lmkit.engine.loop import Engine, EngineLoop
from lmkit.engine.messages import Command, Failed, Phase, Ready, Report, Stop, info_of
from lmkit.engine.streams import BaseClient


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

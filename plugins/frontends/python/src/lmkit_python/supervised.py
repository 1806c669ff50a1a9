"""Supervised: replaces an engine that died, and goes on with its requests."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from time import perf_counter

from lmkit.api import ConfigError, EngineBusy, EngineDead, EngineRequest, ErrorInfo, LmkitError, Sleep, TokenEvent, Wake
from lmkit.engine.adapters import check_adapter
from lmkit.engine.messages import (
    Act,
    EngineFacts,
    EngineStats,
    ForgetPrefixes,
    Pause,
    Resume,
    SetAdapter,
    SetProfile,
    UpdateWeights,
)
from lmkit.engine.observers import Observers
from lmkit.engine.streams import BaseClient, EventStream, State

from lmkit_python.suspects import HEALTHY_SECONDS, Suspects

log = logging.getLogger("lmkit.engine")

MAX_UPDATES = 64  # of some weights, since the last one of all
RESTARTS = 5  # in a row
FIRST_PAUSE, LAST_PAUSE = 0.5, 30.0  # seconds before a dead engine is replaced
TRY_TOKENS = 4  # beyond that point: a death may come a little later than last time
TRY_SECONDS = 5.0  # for a request under suspicion to get beyond the point where an engine died


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
        self._changes: list[SetAdapter | Act] = []  # made while it ran; a successor gets them too
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
            if not await self._make_changes():
                continue
            born = perf_counter()
            if self._client.state == "dead":  # since its start
                self._dead.set()
                continue
            self._watch_over(self._client)
            self._up = True
            self._try_them()

    async def _make_changes(self) -> bool:
        """Those of its predecessors. False: it cannot be what they were, and is given up."""
        acts = any(not isinstance(what, SetAdapter) for what in self._changes)
        paused = any(isinstance(what, Pause) for what in self._changes)
        changes = sorted(self._changes, key=lambda what: isinstance(what, Sleep))
        for what in [*[Pause()] * acts, *changes, *[Resume()] * (acts and not paused)]:
            try:
                await self._client.change(what)
            except LmkitError as error:
                log.error("%s of the engine that was started again: %s", type(what).__name__, error)
                if not isinstance(what, SetAdapter):  # who asks for one that is missing is told
                    await self._client.close()
                    self._client.state, self._client.failure = "dead", error.info()
                    self._dead.set()
                    return False
        return True

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
        if not self._up and self._client.state == "ready":  # it is not yet what its predecessor was
            refusal = refusal or EngineBusy("the engine is still starting", fix="try again in a few seconds").info()
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

    def abort_all(self) -> None:
        self.abort([stream.id for stream in [*self._queue, *self._held]])
        self._client.abort_all()

    async def stats(self) -> EngineStats:
        return await self._client.stats()

    async def set_adapter(self, name: str, path: str | None) -> None:
        check_adapter(name, path)
        await self.change(SetAdapter(name, path))

    async def change(self, what: SetAdapter | Act) -> None:
        """A successor of the engine is changed in the same way before it gets requests."""
        num_updates = sum(isinstance(old, UpdateWeights) for old in self._changes)
        if isinstance(what, UpdateWeights) and what.partial and num_updates >= MAX_UPDATES:
            kept = f"{MAX_UPDATES} updates are remembered for an engine that has to be started again"
            raise ConfigError(kept, fix="update all weights at once")
        await self._client.change(what)
        self._changes = [old for old in self._changes if not _supersedes(what, old)]
        if not isinstance(what, Resume | Wake | ForgetPrefixes | SetProfile):
            self._changes.append(what)

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


def _supersedes(new: SetAdapter | Act, old: SetAdapter | Act) -> bool:
    """Whether `old` need not be done where `new` is."""
    match new:
        case SetAdapter(name):
            return isinstance(old, SetAdapter) and old.name == name
        case Resume() | Pause():
            return isinstance(old, Pause)
        case Wake() | Sleep():
            return isinstance(old, Sleep)
        case UpdateWeights(partial=False):
            return isinstance(old, UpdateWeights)
    return new == old

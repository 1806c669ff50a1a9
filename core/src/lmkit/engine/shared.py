"""SharedCore: one EngineCore for the threads of a process. Whoever waits for events steps it, for everybody.

    with shared.open() as caller:
        caller.add(request)
        for id, event in caller.wait(): ...

No thread of its own is needed, and none holds the engine while it does something else: requests of several threads run
in the same steps, and a stream that nobody reads on stops nobody.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from threading import Condition
from time import sleep
from typing import TYPE_CHECKING

from lmkit.api import EngineDead, EngineRequest, InvalidParam, TokenEvent

if TYPE_CHECKING:
    from lmkit.engine.loop import Core

_BLOCKED = 0.001  # seconds between looks at requests that wait for something beside the engine

Item = tuple[str, TokenEvent | Exception]  # id of a request, and an event of it or why it was not taken


class Caller:
    """One who asks, with the requests that have not finished. Made by SharedCore.open."""

    def __init__(self, shared: SharedCore) -> None:
        self._shared = shared
        self._inbox: deque[Item] = deque()
        self.open: set[str] = set()  # requests that have not finished

    def add(self, request: EngineRequest) -> None:
        """Hands it over; what is wrong with it comes as an item of `wait`."""
        self.open.add(request.id)
        self._shared.post(lambda: self._shared.take(request, self))

    def abort(self, id: str) -> None:
        """Idempotent; no event follows."""
        self.open.discard(id)
        self._shared.post(lambda: self._shared.drop(id))

    def deliver(self, id: str, what: TokenEvent | Exception) -> None:
        """Called under the lock of the SharedCore."""
        if id in self.open:
            self._inbox.append((id, what))

    def wait(self) -> list[Item]:
        """What came, at least one item. Steps the engine if nobody else does. Raises EngineDead."""
        self._shared.run_until(lambda: bool(self._inbox))
        items = []
        while self._inbox:
            id, what = self._inbox.popleft()
            if id not in self.open:
                continue
            if isinstance(what, Exception) or what.finish is not None:
                self.open.discard(id)
            items.append((id, what))
        return items


class SharedCore:
    """`room`: requests that the engine takes at once; the others wait here, in order."""

    def __init__(self, core: Core, room: int) -> None:
        self._core, self._room = core, room
        self._changed = Condition()
        self._stepping = False  # a thread is inside the engine
        self._closed = False
        self._posted: deque[Callable[[], None]] = deque()  # done before the next step, by whoever makes it
        self._waiting: deque[tuple[EngineRequest, Caller]] = deque()
        self._callers: dict[str, Caller] = {}  # of requests inside the engine

    @contextmanager
    def open(self) -> Iterator[Caller]:
        """Whatever is unfinished at the end is aborted."""
        self.require_open()
        caller = Caller(self)
        try:
            yield caller
        finally:
            for id in list(caller.open):
                caller.abort(id)
            if not self._closed:
                self._try_posted()

    def post(self, work: Callable[[], None]) -> None:
        """`work` is done inside the engine, before the next step."""
        self._posted.append(work)

    def take(self, request: EngineRequest, caller: Caller) -> None:
        """Inside the engine: the request waits for its turn."""
        self._waiting.append((request, caller))

    def drop(self, id: str) -> None:
        """Inside the engine: the request is forgotten, wherever it is."""
        if self._callers.pop(id, None) is not None:
            self._core.abort([id])
        else:
            self._waiting = deque(pair for pair in self._waiting if pair[0].id != id)

    def abort_all(self) -> None:
        """Every request ends, with finish="abort"."""
        with self.alone():
            self._do_posted()
            ended = {**self._callers, **{request.id: caller for request, caller in self._waiting}}
            self._core.abort(list(self._callers))
            self._waiting.clear()
            self._callers.clear()
            with self._changed:
                for id, caller in ended.items():
                    caller.deliver(id, TokenEvent(id, finish="abort"))

    def run_until(self, done: Callable[[], bool]) -> None:
        """Steps the engine, or waits while another thread does, until `done`. Raises EngineDead once it is closed."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: done() or self._closed or not self._stepping)
                if done():
                    return
                self.require_open()
                self._stepping = True
            items: list[Item] = []
            try:
                items = self._step()
            except Exception as error:
                items = [(id, error) for id in self._callers]
                if not items:
                    raise
            finally:
                self._leave(items)
            if not items and self._core.blocked:
                sleep(_BLOCKED)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Between two steps, for what changes the engine. Raises EngineDead once it is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or not self._stepping)
            self.require_open()
            self._stepping = True
        try:
            yield
        finally:
            self._leave()

    def close(self) -> bool:
        """Calls that still run end with EngineDead. False if it was closed already."""
        with self._changed:
            self._changed.wait_for(lambda: not self._stepping)
            was_open, self._closed = not self._closed, True
            self._changed.notify_all()
        return was_open

    def require_open(self) -> None:
        """Raises EngineDead."""
        if self._closed:
            raise EngineDead("this LLM is closed", fix="make a new one")

    def _try_posted(self) -> None:
        """Does what was posted, unless a thread is inside and will do it before its next step."""
        with self._changed:
            if self._stepping or self._closed:
                return
            self._stepping = True
        try:
            self._do_posted()
        finally:
            self._leave()

    def _leave(self, items: Iterable[Item] = ()) -> None:
        """Hands out what a step brought before another begins, so that events stay in order."""
        with self._changed:
            for id, what in items:
                if (caller := self._callers.get(id)) is None:
                    continue
                caller.deliver(id, what)
                if isinstance(what, Exception) or what.finish is not None:
                    del self._callers[id]
            self._stepping = False
            self._changed.notify_all()

    def _do_posted(self) -> None:
        while self._posted:
            self._posted.popleft()()
        while self._waiting and len(self._callers) < self._room:
            request, caller = self._waiting.popleft()
            try:
                if request.id in self._callers:
                    raise InvalidParam("id", request.id, "an id that no unfinished request has")
                self._core.add(request)
                self._callers[request.id] = caller
            except Exception as error:
                with self._changed:
                    caller.deliver(request.id, error)
                    self._changed.notify_all()

    def _step(self) -> list[Item]:
        self._do_posted()
        return [(event.id, event) for event in self._core.step()]

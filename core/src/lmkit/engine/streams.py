"""What all clients share: streams of events, states, statistics; without saying how messages travel."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Literal, Protocol

import msgspec

from lmkit.api import EngineBusy, EngineDead, EngineRequest, ErrorInfo, Progress, TokenEvent
from lmkit.engine.adapters import check_adapter
from lmkit.engine.messages import (
    Abort,
    Act,
    AskStats,
    Command,
    Do,
    Done,
    EngineFacts,
    EngineStats,
    Events,
    Failed,
    Phase,
    Ready,
    Report,
    SetAdapter,
    Stats,
    Submit,
    error_of,
)
from lmkit.engine.observers import Observers, Watch

MAX_CHANGES = 16  # that wait for the engine

State = Literal["starting", "ready", "draining", "dead"]


class Aborts(Protocol):
    """Who a stream belongs to."""

    def abort(self, ids: Iterable[str]) -> None: ...


class EventStream:
    """The events of one request, in order. Never blocks whoever feeds it.

    It outlives an engine when its request is one to be resumed: another client takes it over.
    """

    __slots__ = (
        "_announced", "_events", "_finished", "_num_again", "_num_scored", "_output", "_waiter", "_watch", "ended",
        "moved", "num_tokens", "owner", "request",
    )  # fmt: skip

    def __init__(self, owner: Aborts, request: EngineRequest, watch: Watch | None = None) -> None:
        self.owner, self.request = owner, request
        self.ended = False  # the finishing event was put
        self.num_tokens = 0
        self.moved: asyncio.Event | None = None  # set by whoever wants to know of events
        self._watch = watch  # of plugins that observe requests
        self._events: deque[TokenEvent] = deque()
        self._output: list[int] = []  # of a request to be resumed
        self._announced = False
        self._num_scored = self._num_again = 0  # prompt logprobs handed on; those that come once more
        self._waiter: asyncio.Future[None] | None = None
        self._finished = False  # the finishing event was handed out

    @property
    def id(self) -> str:
        return self.request.id

    def rest(self) -> EngineRequest:
        """What is still to be generated, as a request: its tokens so far are given as such."""
        self._num_again = self._num_scored
        request, output = self.request, self._output
        tokens = [*request.token_ids, *output] if output else request.token_ids
        return msgspec.structs.replace(request, token_ids=tokens, num_output=len(output))

    @property
    def num_waiting(self) -> int:
        """Events that nobody has taken yet."""
        return len(self._events)

    def put(self, event: TokenEvent) -> None:
        if self.request.resume:
            self._output += event.tokens
            self._once(event)
        self.num_tokens += len(event.tokens)
        self.ended = event.finish is not None
        self._events.append(event)
        if self._watch is not None:
            self._watch.see(event)
        if self.moved is not None:
            self.moved.set()
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _once(self, event: TokenEvent) -> None:
        """What is said once in a request's life is not said again by another engine."""
        if event.num_cached is not None:
            event.num_cached = None if self._announced else event.num_cached
            self._announced = True
        if event.prompt_logprobs:
            again = min(self._num_again, len(event.prompt_logprobs))
            self._num_again -= again
            event.prompt_logprobs = event.prompt_logprobs[again:]
            self._num_scored += len(event.prompt_logprobs)

    def __aiter__(self) -> EventStream:
        return self

    async def __anext__(self) -> TokenEvent:
        if self._finished:
            raise StopAsyncIteration
        while not self._events:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        event = self._events.popleft()
        self._finished = event.finish is not None
        return event


class BaseClient(ABC):
    """Streams, states and statistics, whatever carries commands and reports."""

    def __init__(self, progress: Progress | None = None) -> None:
        self.state: State = "starting"
        self.failure: ErrorInfo | None = None
        self.facts: EngineFacts = EngineFacts("", 0, 0, 0)
        self.observers: Observers | None = None  # set by whoever has the plugin host, once the engine is ready
        self.killed = False  # from outside
        self.on_orphan: Callable[[EventStream, ErrorInfo], bool] | None = None  # of a dead engine; True: it is taken
        self.on_death: Callable[[], None] | None = None  # called once, when the engine ended without being closed
        self._progress = progress
        self._streams: dict[str, EventStream] = {}
        self._asked: dict[int, asyncio.Future[Any]] = {}
        self._numbers = 0
        self._num_changes = 0  # not yet answered
        self._was_ready = False
        self._over = False  # the streams were ended
        self._started: asyncio.Future[None] | None = None

    @abstractmethod
    def _send(self, command: Command) -> None:
        """Hands a command to the engine; never blocks, never raises."""

    @abstractmethod
    async def start(self) -> None:
        """Returns when the engine is ready; raises what prevented that, typed."""

    @abstractmethod
    async def close(self) -> None:
        """Idempotent. Running requests end with an error event."""

    def submit(self, request: EngineRequest) -> EventStream:
        """Sends the request. The stream of one that cannot be taken has a single event, its error."""
        stream = EventStream(self, request, self.observers.watch(request) if self.observers else None)
        if self.state == "draining":
            error = EngineBusy("the server is shutting down", fix="send the request elsewhere").info()
            stream.put(TokenEvent(request.id, finish="error", error=error))
        else:
            self.adopt(stream)
        return stream

    def adopt(self, stream: EventStream) -> None:
        """Goes on with a stream, from where it is, also while draining: it was taken before."""
        refusal = self._refusal(stream.id)
        if refusal is not None:
            stream.put(TokenEvent(stream.id, finish="error", error=refusal))
            return
        stream.owner = self
        self._streams[stream.id] = stream
        self._send(Submit(stream.rest() if stream.request.resume else stream.request))

    def _refusal(self, id: str) -> ErrorInfo | None:
        if self.state == "dead":
            return self.failure or EngineDead("the engine is closed").info()
        if self.state == "starting":
            return EngineBusy("the engine is still starting", fix="try again in a few seconds").info()
        if id in self._streams:
            return EngineBusy(f"request id {id!r} is in use", fix="use unique ids").info()
        return None

    def abort(self, ids: Iterable[str]) -> None:
        known = [id for id in dict.fromkeys(ids) if id in self._streams]
        if not known:
            return
        for id in known:
            self._streams.pop(id).put(TokenEvent(id, finish="abort"))
        self._send(Abort(known))

    @property
    def ended(self) -> bool:
        return self.state == "dead"

    @property
    def responsive(self) -> bool:
        """Whether the engine answers in the time that it usually takes."""
        return True

    def abort_all(self) -> None:
        self.abort(list(self._streams))

    @property
    def num_streams(self) -> int:
        """Requests that have not finished."""
        return len(self._streams)

    async def stats(self) -> EngineStats:
        """Raises EngineDead."""
        if self.state not in ("ready", "draining"):
            raise error_of(self.failure) if self.failure else EngineDead("the engine is not running")
        self._numbers += 1
        answer = asyncio.get_running_loop().create_future()
        self._asked[self._numbers] = answer
        self._send(AskStats(self._numbers))
        return await answer

    async def set_adapter(self, name: str, path: str | None) -> None:
        """Loads the adapter at `path` as `name`, or forgets `name`. Raises what prevents it."""
        check_adapter(name, path)
        await self.change(SetAdapter(name, path))

    async def change(self, what: SetAdapter | Act) -> None:
        """Raises what prevents it."""
        if self.state not in ("ready", "draining"):
            raise error_of(self.failure) if self.failure else EngineDead("the engine is not running")
        if self._num_changes >= MAX_CHANGES:
            raise EngineBusy(f"{MAX_CHANGES} changes wait for the engine", fix="try again in a few seconds")
        self._numbers += 1
        answer = asyncio.get_running_loop().create_future()
        self._asked[self._numbers] = answer
        self._num_changes += 1
        answer.add_done_callback(self._answered)
        self._send(Do(self._numbers, what))
        await asyncio.shield(answer)  # a client that leaves does not end it: the engine is at it

    def _answered(self, answer: asyncio.Future[Any]) -> None:
        self._num_changes -= 1
        if not answer.cancelled():
            answer.exception()  # it need not be awaited by anybody

    def drain(self) -> None:
        if self.state == "ready":
            self.state = "draining"

    def _receive(self, report: Report) -> None:
        """On the event loop: one report of the engine."""
        match report:
            case Events(events):
                streams = self._streams
                for event in events:
                    stream = streams.get(event.id) if event.finish is None else streams.pop(event.id, None)
                    if stream is not None:  # else: aborted here a moment ago
                        stream.put(event)
            case Stats(number, stats):
                if (answer := self._asked.pop(number, None)) is not None and not answer.done():
                    answer.set_result(stats)
            case Done(number, error):
                if (answer := self._asked.pop(number, None)) is not None and not answer.done():
                    if error is None:
                        answer.set_result(None)
                    else:
                        answer.set_exception(error_of(error))
            case Phase(phase, done, total, unit):
                if self._progress is not None and not self._was_ready:
                    self._progress(phase, done, total, unit)
            case Ready(facts):
                self.facts, self.state, self._was_ready = facts, "ready", True
                if self._started is not None and not self._started.done():
                    self._started.set_result(None)
            case Failed(error):
                self._die(error)

    def _die(self, error: ErrorInfo | None) -> None:
        """The engine is gone: every stream ends now. The first cause is kept. None: it was closed."""
        if self._over:
            return
        self._over, self.state, self.failure = True, "dead", error
        shown = error or EngineDead("the engine was closed").info()
        if self._was_ready and shown.code != EngineDead.code:  # the cause in words, typed as what clients can act on
            shown = EngineDead(f"the engine failed: {shown.message}", fix=shown.fix).info()
        streams, self._streams = self._streams, {}
        for id, stream in streams.items():
            if error is None or self.on_orphan is None or not self.on_orphan(stream, shown):
                stream.put(TokenEvent(id, finish="error", error=shown))
        waiting: list[asyncio.Future] = [*self._asked.values()]
        if self._started is not None:
            waiting.append(self._started)
        for answer in waiting:
            if not answer.done():
                answer.set_exception(error_of(shown))
                answer.exception()  # it need not be awaited by anybody
        self._asked.clear()
        if error is not None and self.on_death is not None:
            self.on_death()

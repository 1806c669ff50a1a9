"""Turns are played: `Generation` on an event loop, `play` in this thread. Leaving aborts the rest."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Generator, Sequence
from time import monotonic
from typing import TYPE_CHECKING, Protocol

from lmkit.api import EngineError, ErrorInfo, TokenEvent, error_of
from lmkit.text.stream import Finish, OutputEvent
from msgspec import structs

from lmkit_python.front.prepare import Turn, numbered

if TYPE_CHECKING:
    from lmkit.engine.client import EngineClient
    from lmkit.engine.shared import SharedCore

_EVENT_BYTES, _LOGPROB_BYTES = 500, 120  # of memory
_TOKEN_BYTES, _ENTRY_BYTES = 50, 240  # of memory: a token with its text, a log-probability with its JSON
_ABORTED = ErrorInfo("aborted", "the request was aborted", status=503, retryable=True)
_ENDED = ErrorInfo("engine", "the engine ended the stream without a reason")


class GenerationFailed(EngineError):
    """The engine ended a choice with an error: `ErrorInfo` as an exception."""

    def __init__(self, info: ErrorInfo) -> None:
        super().__init__(info.message, fix=info.fix)
        self._info = info

    def info(self) -> ErrorInfo:
        return self._info


class Meter(Protocol):
    """Who counts what is generated."""

    def token(self, turn: Turn, event: TokenEvent, events: Sequence[OutputEvent]) -> None: ...

    def aborted(self) -> None: ...


class Generation:
    """Plays turns on an event loop. Used as `async with`: whatever is unfinished at the end is aborted."""

    def __init__(
        self, client: EngineClient, turns: Sequence[Turn], meter: Meter | None = None, at_once: int | None = None
    ) -> None:
        """`at_once`: how many of the turns the engine has at a time; None: all."""
        self._client = client
        self._room = asyncio.Semaphore(at_once or max(1, len(turns)))
        self.turns = list(turns)
        self._meter = meter
        self._pumps: list[asyncio.Task[None]] = []
        self._error: ErrorInfo | None = None
        self._sources: list[AsyncIterator[TokenEvent]] = []
        self._ready: asyncio.Queue[tuple[Turn, list[OutputEvent]] | Exception] = asyncio.Queue()
        top = max((turn.request.params.logprobs or 0 for turn in self.turns), default=0)
        self._event_bytes = _EVENT_BYTES + _LOGPROB_BYTES * top
        self.reserved = 0  # bytes of memory that the known part of the answer will take

    @property
    def tenant(self) -> str:
        """On whose account it is."""
        return self.turns[0].request.tenant if self.turns else ""

    @property
    def held(self) -> int:
        """Bytes of memory that the answer takes so far or has reserved, roughly; 0 once it has failed."""
        return 0 if self._error is not None else max(self.reserved, sum(map(_held_bytes, self.turns)))

    @property
    def backlog(self) -> int:
        """Bytes of what came and was not taken yet, roughly; 0 once it has failed."""
        if self._error is not None:
            return 0
        waiting = sum(getattr(source, "num_waiting", 0) for source in self._sources)
        return (waiting + self._ready.qsize()) * self._event_bytes

    async def __aenter__(self) -> Generation:
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.close()

    def fail(self, error: ErrorInfo) -> None:
        """Ends everything from this side: the turns finish with `error`."""
        self._error = error
        self._client.abort([turn.request.id for turn in self.turns if not turn.stream.finished])

    def close(self) -> None:
        """Aborts what has not finished. Idempotent, never waits."""
        for pump in self._pumps:
            pump.cancel()
        unfinished = [turn for turn in self.turns if not turn.stream.finished]
        if unfinished:
            self._client.abort([turn.request.id for turn in unfinished])
            for turn in unfinished:
                turn.stream.finished = True
                if self._meter is not None:
                    self._meter.aborted()

    def events(self) -> AsyncIterator[tuple[Turn, list[OutputEvent]]]:
        """(turn, its new events) until every turn has finished. `turn.message.feed` makes a change of them.

        More turns may be put behind those that have finished: another call plays them.
        """
        groups = list(by_request([turn for turn in self.turns if not turn.stream.finished]).values())
        return self._one(groups[0]) if len(groups) == 1 else self._several(groups)

    async def _one(self, turns: list[Turn]) -> AsyncIterator[tuple[Turn, list[OutputEvent]]]:
        """The turns of one request."""
        if self._error is not None:  # it failed before these turns' was submitted
            for turn in turns:
                yield turn, turn.stream.fail(self._error)
            return
        for turn in turns:
            turn.submitted = monotonic()
        source = self._client.submit(turns[0].request)
        self._sources.append(source)
        async for event in source:
            for turn, own in dealt(event, turns):
                events = self._take(turn, own)
                if events:
                    yield turn, events
            if turns[0].stream.finished:
                return
        for turn in turns:
            if not turn.stream.finished:
                yield turn, turn.stream.fail(_ENDED)

    async def _several(self, groups: list[list[Turn]]) -> AsyncIterator[tuple[Turn, list[OutputEvent]]]:
        ready = self._ready

        async def pump(turns: list[Turn]) -> None:
            try:
                async with self._room:
                    async for item in self._one(turns):
                        ready.put_nowait(item)
            except Exception as error:  # raised below, where the request is answered
                ready.put_nowait(error)

        self._pumps = [asyncio.create_task(pump(turns)) for turns in groups]
        left = sum(map(len, groups))
        while left:
            item = await ready.get()
            if isinstance(item, Exception):
                raise item
            left -= isinstance(item[1][-1], Finish)
            yield item

    def _take(self, turn: Turn, event: TokenEvent) -> list[OutputEvent]:
        stream = turn.stream
        if event.finish == "abort":  # not by us: a turn that this side ended does not listen any more
            event = TokenEvent(event.id, event.tokens, "error", error=self._error or _ABORTED)
        events = stream.feed(event)
        if stream.must_abort:
            self._client.abort([turn.request.id])
            stream.must_abort = False
        if self._meter is not None:
            self._meter.token(turn, event, events)
        return events


def _held_bytes(turn: Turn) -> int:
    params, stream = turn.request.params, turn.stream
    entries = len(stream.logprobs) * (1 + (params.logprobs or 0))
    entries += len(stream.prompt_logprobs) * (1 + (params.prompt_logprobs or 0))
    return stream.usage.completion_tokens * _TOKEN_BYTES + entries * _ENTRY_BYTES


def play(
    shared: SharedCore, turns: Sequence[Turn], see: Callable[[TokenEvent], None] | None = None
) -> Generator[tuple[Turn, list[OutputEvent]], None, None]:
    """(turn, its new events) until every turn has finished. `see` is shown all events of the engine.

    Raises what is wrong with a request; then nothing is left behind.
    """
    running = by_request(turns)
    with shared.open() as call:
        for several in running.values():
            call.add(several[0].request)
        while running:
            for id, event in call.wait():
                several = running[id]
                if isinstance(event, Exception):
                    raise numbered(event, several[0].number)
                if see is not None:
                    see(event)
                fed = [(turn, turn.stream.feed(own)) for turn, own in dealt(event, several)]
                if several[0].stream.finished:
                    del running[id]
                    if several[0].stream.must_abort:
                        call.abort(id)
                yield from ((turn, events) for turn, events in fed if events)


def by_request(turns: Sequence[Turn]) -> dict[str, list[Turn]]:
    """The turns of each request: those of a search have one together."""
    groups: dict[str, list[Turn]] = {}
    for turn in turns:
        groups.setdefault(turn.request.id, []).append(turn)
    return groups


def dealt(event: TokenEvent, turns: Sequence[Turn]) -> list[tuple[Turn, TokenEvent]]:
    """What each turn of a request is told: its own output of a search, or what became of the request."""
    own = [event, *event.others] if event.others else [event] * len(turns)
    return list(zip(turns, own, strict=True))


def at_once(client: EngineClient) -> int:
    """Requests of one call that the engine has at a time: enough for its steps, and no queue that others wait for."""
    return max(16, 2 * client.facts.max_rows)


def check_finish(turn: Turn) -> None:
    """Raises GenerationFailed when the turn ended with an error, whose field is named as its client does."""
    finish = turn.message.finish
    if finish is None or finish.error is None:
        return
    error = finish.error
    raise GenerationFailed(structs.replace(error, field=turn.constrained_by) if error.field == "grammar" else error)


def check_taken(turn: Turn) -> None:
    """Raises what the engine refused a request for, before its first token, and whatever keeps a vector from coming.

    Errors of grammars are those of an answer: others of the same call need not suffer from them.
    """
    finish = turn.message.finish
    error = finish.error if finish is not None else None
    if error is None:
        return
    refused = not turn.stream.token_ids and error.status < 500 and error.field != "grammar"
    if refused or turn.request.pooling is not None:
        raise numbered(error_of(error), turn.number)

"""One HTTP request as engine requests: prompts x n choices, one OutputStream each, aborted together."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from lmkit.api import EngineRequest, ErrorInfo, LmkitError, SamplingParams, TokenEvent
from lmkit.text.stream import Finish, OutputEvent, OutputStream

if TYPE_CHECKING:
    from lmkit.engine.client import EngineClient

    from lmkit_http.metrics import Metrics


_AT_ONCE = 4000  # tokens that an answer may show to be made on the event loop
_EVENT_BYTES, _LOGPROB_BYTES = 500, 120  # of memory
_ABORTED = ErrorInfo("aborted", "the request was aborted", status=503, retryable=True)


@dataclass(slots=True)
class Choice:
    """One answer. `index` is its index in the response."""

    index: int
    request: EngineRequest
    stream: OutputStream
    submitted: float = 0.0
    last: float = 0.0  # time of the latest token


class GenerationFailed(LmkitError):
    """The engine ended a choice with an error: `ErrorInfo` as an exception."""

    def __init__(self, info: ErrorInfo) -> None:
        super().__init__(info.message, fix=info.fix)
        self._info = info

    def info(self) -> ErrorInfo:
        return self._info


def expand(params: SamplingParams, n: int) -> list[SamplingParams]:
    """The params of n choices: the same, with seeds that differ."""
    if n == 1 or params.seed is None:
        return [params] * n
    top = 1 << 63
    return [replace(params, seed=(params.seed + i + top) % (2 * top) - top) for i in range(n)]


def make_request(
    id: str,
    token_ids: list[int],
    params: SamplingParams,
    *,
    priority: int = 0,
    cache_salt: str | None = None,
    adapter: str | None = None,
) -> EngineRequest:
    return EngineRequest(id, token_ids, params, priority, time.monotonic(), adapter, cache_salt)


def new_id(kind: str) -> str:
    return f"{kind}-{uuid.uuid4().hex}"


class Generation:
    """Runs the choices. Used as `async with`: whatever is unfinished at the end is aborted."""

    def __init__(
        self, client: EngineClient, choices: Sequence[Choice], metrics: Metrics | None = None,
        resume: bool | None = None,
    ) -> None:  # fmt: skip
        """`resume`: whether another engine goes on with them when this one dies. None: where that cannot be told, for
        one choice whose tokens do not depend on chance.
        """
        self._client = client
        self.choices = list(choices)
        for choice in self.choices:
            params = choice.request.params
            certain = len(self.choices) == 1 and (params.greedy or params.seed is not None)
            choice.request.resume = certain if resume is None else resume
        self._metrics = metrics
        self._pumps: list[asyncio.Task[None]] = []
        self._error: ErrorInfo | None = None
        self._sources: list[AsyncIterator[TokenEvent]] = []
        self._ready: asyncio.Queue[tuple[Choice, list[OutputEvent]] | Exception] = asyncio.Queue()
        top = max((c.request.params.logprobs or 0 for c in self.choices), default=0)
        self._event_bytes = _EVENT_BYTES + _LOGPROB_BYTES * top

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
        """Ends everything from this side: the choices finish with `error`."""
        self._error = error
        self._client.abort([c.request.id for c in self.choices if not c.stream.finished])

    def close(self) -> None:
        """Aborts what has not finished. Idempotent, never waits."""
        for pump in self._pumps:
            pump.cancel()
        unfinished = [c for c in self.choices if not c.stream.finished]
        if unfinished:
            self._client.abort([c.request.id for c in unfinished])
            for choice in unfinished:
                choice.stream.finished = True
                if self._metrics is not None:
                    self._metrics.aborted()

    async def shaped(self, make: Callable[..., bytes], *args: Any) -> bytes:
        """`make(*args)`: the body of the whole answer. One that takes long is made in a thread."""
        if self._num_shown <= _AT_ONCE:
            return make(*args)
        return await asyncio.to_thread(make, *args)

    @property
    def _num_shown(self) -> int:
        """Tokens of the answer, with all those whose log-probabilities it shows."""
        num = 0
        for choice in self.choices:
            params, usage = choice.request.params, choice.stream.usage
            num += usage.completion_tokens * (1 + (params.logprobs or 0))
            num += len(choice.stream.prompt_logprobs) * (1 + (params.prompt_logprobs or 0))
        return num

    def events(self) -> AsyncIterator[tuple[Choice, list[OutputEvent]]]:
        """(choice, its new events) until every choice has finished."""
        return self._one(self.choices[0]) if len(self.choices) == 1 else self._several()

    async def _one(self, choice: Choice) -> AsyncIterator[tuple[Choice, list[OutputEvent]]]:
        choice.submitted = time.monotonic()
        source = self._client.submit(choice.request)
        self._sources.append(source)
        async for event in source:
            events = self._take(choice, event)
            if events:
                yield choice, events
            if choice.stream.finished:
                return
        if not choice.stream.finished:
            yield choice, choice.stream.fail(ErrorInfo("engine", "the engine ended the stream without a reason"))

    async def _several(self) -> AsyncIterator[tuple[Choice, list[OutputEvent]]]:
        ready = self._ready

        async def pump(choice: Choice) -> None:
            try:
                async for item in self._one(choice):
                    ready.put_nowait(item)
            except Exception as error:  # raised below, where the request is answered
                ready.put_nowait(error)

        self._pumps = [asyncio.create_task(pump(c)) for c in self.choices]
        left = len(self.choices)
        while left:
            item = await ready.get()
            if isinstance(item, Exception):
                raise item
            choice, events = item
            left -= isinstance(events[-1], Finish)
            yield choice, events

    def _take(self, choice: Choice, event: TokenEvent) -> list[OutputEvent]:
        stream = choice.stream
        if event.finish == "abort":  # not by us: a choice that this side ended does not listen any more
            event = TokenEvent(event.id, event.tokens, "error", error=self._error or _ABORTED)
        events = stream.feed(event)
        if stream.must_abort:
            self._client.abort([choice.request.id])
            stream.must_abort = False
        if self._metrics is not None:
            self._metrics.token(choice, event, events)
        return events

"""The requests that run and the last that ended: what `lmkit why` and traces tell of them.

No texts are kept. Prompts are kept as token ids for a while, so that one can say where two of them part.
"""

from __future__ import annotations

import time
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from lmkit_http.access import Caller
from lmkit_http.strict import shown_names

if TYPE_CHECKING:
    from lmkit.text.stream import Usage
    from lmkit_python.front.prepare import Turn
    from lmkit_python.front.run import Generation

    from lmkit_http.dialect import Exchange

MAX_ENTRIES = 1000  # requests that have ended
MAX_TOKENS = 2 << 20  # of their prompts together
RUNNING = "running"
_TRACE = ("traceparent", "tracestate")  # https://www.w3.org/TR/trace-context


@dataclass(frozen=True, slots=True, eq=False)
class Life:
    """What is known of one turn. Times are monotonic seconds; 0: it has not come to that."""

    id: str  # of the engine's request
    index: int
    prompt: array[int]  # token ids
    adapter: str | None
    salt: str | None  # of the prefix cache
    searched: bool  # its prompt was looked up in the prefix cache
    usage: Usage
    submitted: float
    first: float  # when its first token came
    last: float  # when its latest token came
    ended: float  # the time of looking while it runs
    finish: str  # why it ended, or RUNNING
    error: str | None = None  # its code

    @property
    def queued(self) -> float:
        """Seconds before its first step; of one that never ran, all there are."""
        if not self.submitted:
            return 0.0
        started = self.usage.started
        return started.queued if started is not None else (self.first or self.ended) - self.submitted

    @property
    def began(self) -> float:
        """When it left the queue."""
        return self.submitted + self.queued

    @property
    def prefill(self) -> float:
        return self.usage.started.prefill if self.usage.started is not None else 0.0

    @property
    def stalled(self) -> float:
        return self.usage.started.stalled if self.usage.started is not None else 0.0

    @property
    def decode(self) -> float:
        """Seconds between the first and the latest token."""
        return self.last - self.first if self.first else 0.0

    @property
    def total(self) -> float:
        return self.ended - self.submitted if self.submitted else 0.0


@dataclass(slots=True, eq=False)
class Entry:
    """One request of a client. Made when its turns are given to the engine."""

    id: str  # as answers name it
    request_id: str  # as the header x-request-id of the answer says
    route: str
    model: str
    tenant: str
    at: float  # seconds since the epoch
    asked: type  # of its ask
    trace: Mapping[str, str]  # headers that say of which trace it is a part
    dropped: Sequence[str]  # names of fields that were accepted and change nothing
    turns: Sequence[Turn] = ()  # while it runs
    ended: Sequence[Life] = ()  # afterwards

    @property
    def lives(self) -> Sequence[Life]:
        return self.ended or [_life(turn, None) for turn in self.turns]

    @property
    def finished(self) -> bool:
        return bool(self.ended)

    def seen_by(self, caller: Caller) -> bool:
        return caller.admin or self.tenant == caller.tenant


@dataclass(eq=False)
class History:
    """Bounded; used from the event loop. `on_end` is called with each entry that ends."""

    on_end: Callable[[Entry], None] | None = None
    _running: dict[Generation, Entry] = field(default_factory=dict)
    _past: OrderedDict[str, Entry] = field(default_factory=OrderedDict)
    _num_tokens: int = 0  # of the prompts in `_past`

    def open(
        self,
        exchange: Exchange,
        generation: Generation,
        route: str,
        model: str,
        tenant: str,
        headers: Mapping[str, str],
    ) -> Entry:
        """The headers of the answer get the id under which the request is found."""
        request_id = exchange.headers.setdefault("x-request-id", exchange.headers.get("request-id", exchange.id))
        trace = {name: headers[name] for name in _TRACE if name in headers}
        entry = Entry(
            exchange.id, request_id, route, model, tenant, time.time(), type(exchange.ask), trace,
            shown_names(exchange.dropped), generation.turns,
        )  # fmt: skip
        self._running[generation] = entry
        return entry

    def close(self, generation: Generation) -> None:
        """It has ended, one way or another. Idempotent."""
        entry = self._running.pop(generation, None)
        if entry is None:
            return
        now = time.monotonic()
        entry.ended = tuple(_life(turn, now) for turn in entry.turns)
        entry.turns = ()
        if self.on_end is not None:
            self.on_end(entry)
        self._forget(self._past.pop(entry.id, None))
        self._past[entry.id] = entry
        self._num_tokens += _size(entry)
        while self._past and (len(self._past) > MAX_ENTRIES or self._num_tokens > MAX_TOKENS):
            self._forget(self._past.popitem(last=False)[1])

    def _forget(self, entry: Entry | None) -> None:
        self._num_tokens -= _size(entry) if entry is not None else 0

    def __iter__(self) -> Iterator[Entry]:
        """The newest first."""
        yield from reversed(self._running.values())
        yield from reversed(self._past.values())

    def find(self, id: str, caller: Caller) -> Entry | None:
        """The newest with that id, of those that `caller` may see."""
        return next((e for e in self if id in (e.id, e.request_id) and e.seen_by(caller)), None)


def _size(entry: Entry) -> int:
    return sum(len(life.prompt) for life in entry.ended)


def _life(turn: Turn, now: float | None) -> Life:
    """`now`: when its request ended; None: it has not."""
    request, message, usage = turn.request, turn.message, turn.stream.usage
    finish = message.finish
    over = finish is not None or now is not None
    ended = now or time.monotonic()
    if finish is not None and turn.last:
        ended = turn.last
    return Life(
        request.id, turn.index, array("I", request.token_ids), request.adapter, request.cache_salt,
        request.pooling is None and request.params.prompt_logprobs is None, usage, turn.submitted, turn.first,
        turn.last, ended, (finish.reason if finish is not None else "abort") if over else RUNNING,
        finish.error.code if finish is not None and finish.error is not None else None,
    )  # fmt: skip

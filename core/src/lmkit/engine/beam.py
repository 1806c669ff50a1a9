"""Beam search above the step loop: each step asks for one token more of every beam.

The likeliest continuation of a beam stays in the row of its request, which rests until all beams have their tokens.
Others begin a request with the blocks of the beam that they come from: whole ones are shared, the one that is partly
filled is copied (see `Scheduler`), so one position is computed for each beam and step. Beams are requests like others:
they wait, are preempted and computed again like others, and what is lost with them is time. None rests while a beam of
its search waits for room.

What is kept and when it ends is as in `transformers` (`generate(num_beams=...)`), whose results are the reference.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from dataclasses import replace as changed
from heapq import nlargest
from typing import Any

from msgspec.structs import replace

from lmkit.api import Beams, EngineRequest, InvalidParam, SamplingParams, TokenEvent, TokenLogprob
from lmkit.engine.core import EngineCore
from lmkit.scheduling.request import Request

Beam = tuple[float, tuple[TokenLogprob, ...]]  # a score, and what is known of each token of the output


@dataclass
class Search:
    """One search: `requests` is asked for the next step, `feed` is told what came, `answer` is given at the end."""

    request: EngineRequest
    ends: frozenset[int]  # tokens that end an output
    rests: bool  # requests may rest in their rows
    forks: bool  # others may begin with a request that goes on: what it has computed stays as it is
    running: list[Beam] = field(default_factory=lambda: [(0.0, ())])  # scored by the sum of log-probabilities
    finished: list[Beam] = field(default_factory=list)  # best first, scored with the length penalty
    root: bytes = b""  # parent of the first block of the prompt, and digests of its blocks
    digests: list[bytes] = field(default_factory=list)
    num_cached: int = 0  # tokens of the prompt
    num_asked: int = 0
    live: dict[str, Request] = field(default_factory=dict)  # of beams, under way or at rest
    asked: dict[str, int] = field(default_factory=dict)  # requests under way -> number of the beam
    resting: dict[int, str] = field(default_factory=dict)  # beam -> its request, at rest
    forked: set[str] = field(default_factory=set)  # requests at rest with which others begin
    left: list[str] = field(default_factory=list)  # requests at rest that do not go on
    found: dict[int, list[TokenLogprob]] = field(default_factory=dict)  # beam -> candidates for its next token

    @property
    def beams(self) -> Beams:
        assert self.request.beams is not None
        return self.request.beams

    def requests(self) -> Iterator[EngineRequest]:
        """One for each beam that has none. Their token is not drawn for its own sake: what is read are the likeliest
        ones."""
        request, num_top = self.request, self.beams.width + len(self.ends)
        num_output = len(self.running[0][1])
        max_tokens = request.params.max_tokens if self.rests else num_output + 1
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True, logprobs=num_top)
        for beam, (_, entries) in enumerate(self.running):
            if beam in self.resting:
                continue
            id = f"{request.id}/{self.num_asked}"
            self.num_asked += 1
            self.asked[id] = beam
            tokens = [*request.token_ids, *[entry.token for entry in entries]]
            yield replace(request, id=id, token_ids=tokens, params=params, num_output=num_output, beams=None)

    def feed(self, event: TokenEvent) -> bool:
        """Whether all beams have their candidates now."""
        beam = self.asked.pop(event.id)
        if not self.running[beam][1]:
            self.num_cached, first = event.num_cached or 0, self.live[event.id]
            self.root, self.digests = first.root_hash, first.block_hashes[:]
        if event.finish:
            del self.live[event.id]
        else:
            self.resting[beam] = event.id
        (entry,) = event.logprobs
        num_top = self.request.params.logprobs or 0
        self.found[beam] = [
            TokenLogprob(token, logprob, rank, entry.top[:num_top])
            for rank, (token, logprob) in enumerate(entry.top, start=1)
        ]
        return not self.asked

    def advance(self) -> bool:
        """Keeps the best continuations of all beams; whether the search goes on."""
        width, penalty, length = self.beams.width, self.beams.length_penalty, len(self.running[0][1]) + 1
        found = [
            (score + entry.logprob, beam, entry)
            for beam, (score, _) in enumerate(self.running)
            for entry in self.found[beam]
        ]
        self.found.clear()
        best = nlargest(width + width * len(self.ends), found, key=_score)
        over = length == self.request.params.max_tokens
        ended = [
            (score / length**penalty, (*self.running[beam][1], entry))
            for score, beam, entry in best[:width]
            if over or entry.token in self.ends
        ]
        self.finished = nlargest(width, self.finished + ended, key=_score)
        chosen = [one for one in best if one[2].token not in self.ends][:width]
        self.running = [(score, (*self.running[beam][1], entry)) for score, beam, entry in chosen]
        goes_on = not over and bool(self.running) and self._may_improve(length)
        self._keep_rows(chosen if goes_on else [])
        return goes_on

    def _keep_rows(self, chosen: Sequence[tuple[float, int, TokenLogprob]]) -> None:
        """Which requests go on as which of the `chosen` beams: those whose own token is its last."""
        before, kept, self.forked = self.resting, dict[int, str](), set()
        for number, (_, beam, entry) in enumerate(chosen):
            if (id := before.get(beam)) is None:
                continue
            if entry.token == self.live[id].tokens[-1]:
                kept[number] = id
            else:
                self.forked.add(id)
        self.resting = {number: id for number, id in kept.items() if self.forks or id not in self.forked}
        self.left = [id for id in before.values() if id not in self.resting.values()]

    def _may_improve(self, length: int) -> bool:
        """Whether a running beam may still end better than the worst that is kept."""
        if len(self.finished) < self.beams.width:
            return True
        early, penalty = self.beams.early_stopping, self.beams.length_penalty
        if early is True:
            return False
        reach = self.request.params.max_tokens if early == "never" and penalty > 0 else length
        assert reach is not None
        return self.running[0][0] / reach**penalty > self.finished[-1][0]

    def answer(self) -> TokenEvent:
        """The best as an event of the request, with the next ones in it."""
        events = [self._event(entries) for _, entries in self.finished[: self.beams.n]]
        events[0].others = events[1:]
        return events[0]

    def _event(self, entries: tuple[TokenLogprob, ...]) -> TokenEvent:
        last = entries[-1].token
        ended = last in self.ends
        logprobs = list(entries) if self.request.params.logprobs is not None else []
        return TokenEvent(
            self.request.id, [entry.token for entry in entries], "stop" if ended else "length",
            last if ended else None, logprobs, num_cached=self.num_cached,
        )  # fmt: skip


def _score(scored: tuple[Any, ...]) -> float:
    return scored[0]


class BeamCore(EngineCore):
    """A step loop that searches for those who ask for it. A request with `beams` yields one event, its last."""

    def __init__(self, *args: object, eos_token_ids: Iterable[int] = (), **options: object) -> None:
        super().__init__(*args, **options)  # type: ignore[arg-type]
        self._eos = frozenset(eos_token_ids)
        self._searches: dict[str, Search] = {}  # by request
        self._owners: dict[str, Search] = {}  # by request of a beam
        self._rests = hasattr(self.scheduler, "offer")
        self._forks = not getattr(self.scheduler, "zeroed", ())  # a recurrent state is written over

    def add(self, request: EngineRequest) -> None:
        if request.beams is None:
            super().add(request)
            return
        if request.id in self._searches:
            raise InvalidParam("id", request.id, "an id that no unfinished request has")
        params = request.params
        ends = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self._eos)
        request.beams.check(params, len(ends))
        admitted = self.intake.admit(replace(request, beams=None))  # is all of it possible? then a part is, too
        request = replace(request, params=changed(params, max_tokens=admitted.params.max_tokens))
        search = Search(request, ends, self._rests, self._forks)
        self._searches[request.id] = search
        try:
            self._ask(search)
        except Exception:
            self.abort([request.id])
            raise

    def _ask(self, search: Search) -> None:
        for id in search.forked:
            self.scheduler.offer(search.live[id])  # type: ignore[attr-defined]
        self._leave(search)
        new = list(search.requests())
        for beam, id in search.resting.items():
            search.live[id].rest_at += 1
            search.asked[id] = beam
        search.resting = {}
        for request in new:
            self._owners[request.id] = search
            super().add(request)

    def _leave(self, search: Search) -> None:
        """Ends the requests of a search that do not go on."""
        for id in search.left:
            del self._owners[id], search.live[id]
        super().abort(search.left)
        search.left = []

    def _admit(self, request: EngineRequest) -> Request:
        """A beam knows the digests of its prompt's blocks: they are not made again for each token."""
        admitted = super()._admit(request)
        if (search := self._owners.get(request.id)) is not None:
            search.live[request.id] = admitted
            if search.running[0][1] and self.life.gate in admitted.gates:
                admitted.gates.remove(self.life.gate)  # it goes on with what had begun
            if self._rests:
                admitted.rest_at = len(admitted.tokens) + 1
            if admitted.root_hash == search.root:  # its adapter may have been loaded anew
                admitted.block_hashes = search.digests[:]
        return admitted

    def abort(self, ids: Iterable[str]) -> None:
        """Idempotent; no event follows."""
        of_beams: list[str] = []
        for id in (ids := list(ids)):
            if (search := self._searches.pop(id, None)) is not None:
                of_beams += [beam for beam in search.live if self._owners.pop(beam, None)]
        super().abort([*ids, *of_beams])

    def step(self) -> list[TokenEvent]:
        """Raises EngineDead."""
        for search in self._searches.values():
            if search.resting and any(request.table is None for request in search.live.values()):
                for id in search.resting.values():
                    self.scheduler.offer(search.live[id])  # type: ignore[attr-defined]
                search.left, search.resting = list(search.resting.values()), {}
                self._leave(search)
        return [told for event in super().step() if (told := self._read(event)) is not None]

    def _read(self, event: TokenEvent) -> TokenEvent | None:
        """The event as it is told; None: it is a beam's."""
        search = self._owners.get(event.id)
        if search is None:
            return event
        if event.finish:
            del self._owners[event.id]
        id = search.request.id
        if event.finish == "error":
            self.abort([id])
            return replace(event, id=id)
        if not search.feed(event):
            return None
        if search.advance():
            self._ask(search)
            return None
        self._leave(search)
        del self._searches[id]
        return search.answer()

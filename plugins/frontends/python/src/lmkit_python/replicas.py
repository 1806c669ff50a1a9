"""Replicas: several engines of one model behind one client (`--dp N`), chosen by what they have cached and by load."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Protocol

import msgspec
from lmkit.api import EngineDead, EngineRequest, ErrorInfo, SchedStats
from lmkit.engine.client import EngineClient
from lmkit.engine.messages import Act, EngineFacts, EngineStats, SetAdapter, SetProfile
from lmkit.engine.observers import Observers
from lmkit.engine.streams import EventStream, State

SPAN = 128  # tokens of a prompt that are remembered together
MAX_SPANS = 32  # of a prompt: those beyond say little more about where it was
MIN_SPANS = 1024  # that are remembered at least, of all prompts
STRIDE = 8  # of these tokens every eighth is looked at
SLACK = 12  # requests that an engine with the prefix may have more than twice those of another
SAMPLE = 4  # engines among which the least busy one is looked for: more are sampled
ORDER: tuple[State, ...] = ("ready", "starting", "draining", "dead")  # the first that some replica is in
UNSETTLED = ("finishing", "pausing")
SUMMED = ("num_kv_tokens", "max_rows", "max_waiting", "num_ranks")  # facts that replicas have together


class Replica(EngineClient, Protocol):
    """One engine, as Supervised shows it."""

    observers: Observers | None

    def submit(self, request: EngineRequest) -> EventStream: ...


class Router:
    """Chooses an engine for each prompt: the one that had the longest beginning of it last, unless it is much busier
    than another; else the least busy one, of a sample where there are many ("the power of two choices",
    M. Mitzenmacher, IEEE TPDS 12(10), 2001).

    It remembers the beginnings of the last prompts, `max_spans` pieces of SPAN tokens, and up to as many older ones.
    """

    def __init__(self, num_engines: int, max_spans: int, seed: int = 0) -> None:
        self._engines, self._max_spans = range(num_engines), max(MIN_SPANS, max_spans)
        self._young: dict[int, int] = {}  # hash of a beginning -> engine
        self._old: dict[int, int] = {}  # those that were not used since it was young
        self._random = random.Random(seed)

    def choose(self, tokens: Sequence[int], scope: str, load: Callable[[int], int | None]) -> int | None:
        """An engine for a prompt. `scope`: prompts of different ones share no cache. `load`: requests that an engine
        has, None for one that takes none. None: no engine takes any."""
        spans = _spans(tokens, scope)
        few, draw = len(self._engines) <= SAMPLE, self._random.random
        sample = self._engines if few else [int(draw() * len(self._engines)) for _ in range(SAMPLE)]
        loads = _loads(sample, load) or ([] if few else _loads(self._engines, load))
        if not loads:
            return None
        lightest, chosen = min(loads)
        holder = self._holder(spans)
        if holder is not None and (busy := load(holder)) is not None and busy <= 2 * lightest + SLACK:
            chosen = holder
        self._young.update(dict.fromkeys(spans, chosen))
        if len(self._young) > self._max_spans:
            self._young, self._old = {}, self._young
        return chosen

    def _holder(self, spans: list[int]) -> int | None:
        """Who had the longest beginning last."""
        for span in reversed(spans):
            if (found := self._young.get(span)) is not None or (found := self._old.get(span)) is not None:
                return found
        return None


def _loads(engines: Iterable[int], load: Callable[[int], int | None]) -> list[tuple[int, int]]:
    return [(busy, engine) for engine in engines if (busy := load(engine)) is not None]


def _spans(tokens: Sequence[int], scope: str) -> list[int]:
    """A hash for each beginning of whole spans. Two that look alike cost a worse choice, no wrong answer."""
    spans, before = [], hash(scope)
    seen = tuple(tokens[: min(len(tokens) // SPAN, MAX_SPANS) * SPAN : STRIDE])
    for at in range(0, len(seen), SPAN // STRIDE):
        before = hash((before, seen[at : at + SPAN // STRIDE]))
        spans.append(before)
    return spans


class Replicas:
    """An EngineClient of several. A change is made to the first, and where that works to the others."""

    def __init__(self, engines: Sequence[Replica]) -> None:
        self._engines = engines
        self._open: list[list[EventStream]] = [[] for _ in engines]
        self._router: Router | None = None  # from start() on

    @property
    def state(self) -> State:
        return min((engine.state for engine in self._engines), key=ORDER.index)

    @property
    def failure(self) -> ErrorInfo | None:
        return next((engine.failure for engine in self._engines if engine.failure is not None), None)

    @property
    def ended(self) -> bool:
        return all(engine.ended for engine in self._engines)

    @property
    def responsive(self) -> bool:
        return any(engine.responsive for engine in self._engines if engine.state == "ready")

    @property
    def facts(self) -> EngineFacts:
        """What they hold and take together; sizes in bytes are those of one."""
        facts = [engine.facts for engine in self._engines]
        sums = {name: sum(getattr(one, name) for one in facts) for name in SUMMED}
        return msgspec.structs.replace(facts[0], **sums)

    @property
    def observers(self) -> Observers | None:
        return self._engines[0].observers

    @observers.setter
    def observers(self, value: Observers | None) -> None:
        for engine in self._engines:
            engine.observers = value

    async def start(self) -> None:
        """Side by side. Raises what prevents the first that cannot start; then none runs."""
        try:
            async with asyncio.TaskGroup() as group:
                for engine in self._engines:
                    group.create_task(engine.start())
        except BaseExceptionGroup as several:
            await self.close()
            raise several.exceptions[0] from None
        self._router = Router(len(self._engines), self.facts.num_kv_tokens // SPAN)

    def submit(self, request: EngineRequest) -> EventStream:
        assert self._router is not None, "start comes first"
        chosen = self._router.choose(request.token_ids, _scope(request), self._load)
        if chosen is None:  # whichever says why
            chosen = next((i for i, engine in enumerate(self._engines) if not engine.ended), 0)
        stream = self._engines[chosen].submit(request)
        self._open[chosen].append(stream)
        return stream

    def _load(self, index: int) -> int | None:
        if self._engines[index].state != "ready":
            return None
        self._open[index] = live = [stream for stream in self._open[index] if not stream.ended]
        return len(live)

    def abort(self, ids: Iterable[str]) -> None:
        ids = set(ids)
        for engine in self._engines:
            engine.abort(ids)

    def abort_all(self) -> None:
        for engine in self._engines:
            engine.abort_all()

    async def stats(self) -> EngineStats:
        """Those of all that answer, added up. Raises EngineDead when none does."""
        answers = await asyncio.gather(*(engine.stats() for engine in self._engines), return_exceptions=True)
        for answer in answers:
            if isinstance(answer, BaseException) and not isinstance(answer, EngineDead):
                raise answer
        found = [answer for answer in answers if isinstance(answer, EngineStats)]
        if not found:
            raise next(answer for answer in answers if isinstance(answer, EngineDead))
        names = SchedStats.__struct_fields__
        sched = SchedStats(**{name: sum(getattr(one.sched, name) for one in found) for name in names})
        life = next((one.life for one in found if one.life in UNSETTLED), found[0].life)
        return EngineStats(sched, sum(one.num_compiled for one in found), life)

    async def set_adapter(self, name: str, path: str | None) -> None:
        await self._to_all(lambda engine: engine.set_adapter(name, path))

    async def change(self, what: SetAdapter | Act) -> None:
        """A profile is one of the first engine: there is one file."""
        if isinstance(what, SetProfile):
            await self._engines[0].change(what)
        else:
            await self._to_all(lambda engine: engine.change(what))

    async def _to_all(self, change: Callable[[Replica], Awaitable[None]]) -> None:
        first, *others = self._engines
        await change(first)
        await asyncio.gather(*(change(engine) for engine in others))

    def drain(self) -> None:
        for engine in self._engines:
            engine.drain()

    async def close(self) -> None:
        await asyncio.gather(*(engine.close() for engine in self._engines))


def _scope(request: EngineRequest) -> str:
    return f"{request.adapter}/{request.cache_salt}"

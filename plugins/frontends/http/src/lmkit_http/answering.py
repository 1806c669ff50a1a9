"""From what came in to a whole answer, whoever asked: a client that waits for it, or a dialect's own work."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from math import prod
from typing import TYPE_CHECKING

from lmkit_python.front.ask import VectorAsk
from lmkit_python.front.prepare import Turn, prepare
from lmkit_python.front.run import Generation, at_once, check_finish

from lmkit_http.dialect import Answer, Dialect, Exchange, Incoming
from lmkit_http.dialects import parsed
from lmkit_http.size import bound_answer
from lmkit_http.strict import warnings_header

if TYPE_CHECKING:
    from lmkit_http.access import Caller
    from lmkit_http.backend import Backend

_AT_ONCE = 4000  # tokens or numbers that an answer may show to be made on the event loop
Prepared = tuple[Dialect, Answer | tuple[Exchange, Generation]]  # whose answer it is, and what it takes


def prepared(
    backend: Backend, dialects: Sequence[Dialect], dialect: Dialect, incoming: Incoming, caller: Caller
) -> Prepared:
    """CPU work, for a thread. Raises RequestError, HttpError."""
    dialect, exchange = parsed(dialects, dialect, incoming, backend.served)
    if isinstance(exchange, Answer):
        return dialect, exchange
    ask = exchange.ask
    caller.check_priority(ask.priority)
    turns = exchange.turns(partial(prepare, backend.text, backend.facts))
    reserved = bound_answer(ask, turns, backend.facts) if exchange.played else 0
    exchange.headers |= warnings_header(exchange.dropped)
    if not exchange.played:
        return dialect, Answer(exchange.whole(turns), media_type=exchange.media_type, headers=exchange.headers)
    for turn in turns:
        turn.request.cache_salt, turn.request.tenant = caller.salt(ask.salt), caller.tenant
    room = at_once(backend.client) if isinstance(ask, VectorAsk) else None
    generation = Generation(backend.client, turns, backend.metrics, room)
    generation.reserved = reserved
    return dialect, (exchange, generation)


async def goes_on(backend: Backend, exchange: Exchange, generation: Generation) -> bool:
    """Whether more is asked, whose turns the generation has now. Raises RequestError."""
    before = generation.turns[-1].request
    if (ask := await exchange.more(generation.turns)) is None:
        return False
    size, id = 4 * len(before.token_ids), f"{exchange.id}-{len(generation.turns)}"
    turns = await backend.workers.run(size, prepare, backend.text, backend.facts, ask, id)
    bound_answer(ask, [*generation.turns, *turns], backend.facts)
    for turn in turns:
        request = turn.request
        request.cache_salt, request.tenant, request.priority = before.cache_salt, before.tenant, before.priority
    generation.turns += turns
    return True


async def whole(backend: Backend, exchange: Exchange, generation: Generation) -> bytes:
    """The whole answer: what the changes of its messages add up to. A long one is written in a thread."""
    async with generation:
        asked = True
        while asked:
            async for turn, events in generation.events():
                turn.message.feed(events)
                check_finish(turn)
            asked = await goes_on(backend, exchange, generation)
    if _num_shown(generation.turns) <= _AT_ONCE:
        return exchange.whole(generation.turns)
    return await asyncio.to_thread(exchange.whole, generation.turns)


def _num_shown(turns: Sequence[Turn]) -> int:
    """Tokens of the answer, with all those whose log-probabilities it shows; of vectors, their numbers."""
    num = 0
    for turn in turns:
        params, stream = turn.request.params, turn.stream
        num += stream.usage.completion_tokens * (1 + (params.logprobs or 0))
        num += len(stream.prompt_logprobs) * (1 + (params.prompt_logprobs or 0))
        num += prod(pooled.shape) if (pooled := turn.message.pooled) is not None else 0
    return num

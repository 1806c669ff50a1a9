"""Requests of a file are answered, and their results written."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import TYPE_CHECKING, Any

from lmkit.api import EngineDead
from lmkit_http.dialect import Answer, Incoming

from lmkit_run_batch.lines import Line
from lmkit_run_batch.results import Results

if TYPE_CHECKING:
    from lmkit.engine.client import EngineClient

LOOK = 0.25  # seconds between looks at the engine
AT_ONCE = 256  # requests that wait for room or are answered; how many there is room for is the server's to say
MAX_BYTES = 8 << 20  # of their bodies together; a larger one is alone
Ask = Callable[[Incoming], Awaitable[Answer]]


async def play(
    lines: Iterable[Line], results: Results, ask: Ask, tenant: str = "",
    wrote: Callable[[Answer], None] = lambda answer: None,
) -> None:  # fmt: skip
    """Answers each request that has no result yet. `wrote` is called after each.

    When this is cancelled what has no result has none. Raises what writing results does.
    """
    running: dict[asyncio.Task[None], int] = {}  # the bytes of each

    async def one(line: Line) -> None:
        answer = await ask(Incoming(f"POST {line.url}", line.body, tenant=tenant))
        await asyncio.to_thread(results.answered, line.custom_id, answer)
        wrote(answer)

    try:
        for line in lines:
            if line.custom_id in results.ids:
                continue
            while running and (len(running) >= AT_ONCE or sum(running.values()) + len(line.body) > MAX_BYTES):
                await _some(running)
            running[asyncio.create_task(one(line))] = len(line.body)
        while running:
            await _some(running)
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


async def while_alive(client: EngineClient, work: Coroutine[Any, Any, None]) -> None:
    """Raises EngineDead when there is no engine any more, which requests would wait for."""
    playing = asyncio.create_task(work)
    try:
        while not (client.ended or playing.done()):
            await asyncio.wait((playing,), timeout=LOOK)
    finally:
        playing.cancel()
        await asyncio.gather(playing, return_exceptions=True)
    if playing.cancelled():
        failure = client.failure
        raise EngineDead(failure.message if failure is not None else "the engine is gone", fix="go on with --resume")
    playing.result()


async def _some(running: dict[asyncio.Task[None], int]) -> None:
    """Until one has ended, and is gone from `running`. Raises what it raised."""
    done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
    for task in done:
        del running[task]
    for task in done:
        task.result()

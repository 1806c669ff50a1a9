"""Requests of a file are answered, and their results written."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable

from lmkit.front.dialect import Answer, Incoming

from lmkit_dialect_batches.lines import Line
from lmkit_dialect_batches.results import Results

AT_ONCE = 256  # requests that wait for room or are answered; how many there is room for is the server's to say
Ask = Callable[[Incoming], Awaitable[Answer]]


async def play(
    lines: Iterable[Line], results: Results, ask: Ask, tenant: str = "",
    wrote: Callable[[Answer], None] = lambda answer: None,
) -> None:  # fmt: skip
    """Answers each request that has no result yet. `wrote` is called after each.

    When this is cancelled what has no result has none. Raises what writing results does.
    """
    running: set[asyncio.Task[None]] = set()

    async def one(line: Line) -> None:
        answer = await ask(Incoming(f"POST {line.url}", line.body, tenant=tenant))
        await asyncio.to_thread(results.answered, line.custom_id, answer)
        wrote(answer)

    try:
        for line in lines:
            if line.custom_id in results.ids:
                continue
            if len(running) >= AT_ONCE:
                running = await _some(running)
            running.add(asyncio.create_task(one(line)))
        while running:
            running = await _some(running)
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


async def _some(running: set[asyncio.Task[None]]) -> set[asyncio.Task[None]]:
    """Those that still run once one has ended. Raises what it raised."""
    done, left = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
    for task in done:
        task.result()
    return left

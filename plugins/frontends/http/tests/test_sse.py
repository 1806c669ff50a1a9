"""Answers that watch their client: what is sent first, what of an error, and in how many turns of the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from lmkit.api import RequestError
from lmkit_dialect_openai.dialect import OpenAI
from lmkit_http.sse import ClientGone, EventResponse, while_connected


async def stays() -> Any:
    await asyncio.Event().wait()


async def leaves() -> Any:
    return {"type": "http.disconnect"}


async def test_a_result_is_there_in_the_next_turn() -> None:
    """Each task in between is one more turn to wait for, behind all that came and is refused."""
    work: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    waiting = asyncio.ensure_future(while_connected(stays, work))
    await asyncio.sleep(0)
    work.set_result(1)
    await asyncio.sleep(0)
    assert waiting.done()
    assert waiting.result() == 1


async def test_work_ends_with_the_client() -> None:
    ended = False

    async def work() -> None:
        nonlocal ended
        try:
            await asyncio.Event().wait()
        finally:
            ended = True

    with pytest.raises(ClientGone):
        await while_connected(leaves, work())
    assert ended
    task = asyncio.current_task()
    assert task is not None
    assert not task.cancelling()


async def test_who_is_cancelled_from_outside_does_not_take_it_for_the_client() -> None:
    waiting = asyncio.ensure_future(while_connected(stays, asyncio.Event().wait()))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting


async def sent(chunks: AsyncIterator[bytes]) -> list[Any]:
    """Statuses and bodies of an answer with these chunks."""
    found: list[Any] = []

    async def send(message: Any) -> None:
        found.append(message["status"] if message["type"] == "http.response.start" else message["body"])

    closed: list[int] = []
    await EventResponse(chunks, closed.append, lambda error: None, OpenAI(), {})({"type": "http"}, stays, send)
    assert closed == found[:1]
    return found


async def of(*parts: bytes | Exception, delay: float = 0.0) -> AsyncIterator[bytes]:
    for part in parts:
        await asyncio.sleep(delay)
        if isinstance(part, Exception):
            raise part
        yield part


@pytest.mark.parametrize("delay", [0.0, 0.03])
async def test_the_head_does_not_wait_for_long(monkeypatch: pytest.MonkeyPatch, delay: float) -> None:
    """An error before it has its own status, one behind it is a chunk."""
    monkeypatch.setattr("lmkit_http.sse.FIRST_WAIT", 0.01)
    end = OpenAI.stream_end
    assert await sent(of(b"a", b"b", delay=delay)) == [200, b"a", b"b", end]
    assert await sent(of()) == [200, end]
    status, *bodies = await sent(of(RequestError("no"), delay=delay))
    assert status == (200 if delay else 400)
    assert b'"no"' in bodies[0]
    assert bodies[1:] == ([end] if delay else [])
    status, first, error, last = await sent(of(b"a", RequestError("no"), delay=delay))
    assert (status, first, last) == (200, b"a", end)
    assert error.startswith(b"data: ")

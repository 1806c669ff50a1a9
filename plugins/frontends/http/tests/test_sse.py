"""Answers that watch their client: what is sent first, what of an error, and in how many turns of the event loop."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from lmkit.api import RequestError
from lmkit_dialect_anthropic.dialect import Anthropic
from lmkit_dialect_ollama.dialect import Ollama
from lmkit_dialect_openai.dialect import OpenAI
from lmkit_http.dialect import Dialect
from lmkit_http.sse import ClientGone, EventResponse, while_connected
from lmkit_testing.serving import listening, scripted


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


@pytest.mark.parametrize(
    ("dialect", "said"),
    [(OpenAI(), b": waiting\n\n"), (Anthropic(), b'event: ping\ndata: {"type": "ping"}\n\n'), (Ollama(), b" ")],
)
async def test_a_stream_that_waits_is_not_silent(
    monkeypatch: pytest.MonkeyPatch, dialect: Dialect, said: bytes
) -> None:
    """Before the first chunk and after it, between whole lines only, and never after the end."""
    monkeypatch.setattr("lmkit_http.sse.FIRST_WAIT", 0.01)
    monkeypatch.setattr("lmkit_http.sse.SILENCE", 0.05)
    bodies: list[bytes] = []
    step = asyncio.Event()

    async def send(message: Any) -> None:
        if message["type"] == "http.response.body":
            bodies.append(message["body"])
            step.set()

    async def until(num: int) -> None:
        async with asyncio.timeout(20):
            while bodies.count(said) < num:
                step.clear()
                await step.wait()

    async def chunks() -> AsyncIterator[bytes]:
        await until(2)
        yield b"whole\n"
        await until(4)
        yield b"cut"
        await asyncio.sleep(0.3)
        yield b"end\n"

    await EventResponse(chunks(), lambda _: None, lambda _: None, dialect, {})({"type": "http"}, stays, send)
    at = bodies.index(b"whole\n")
    assert bodies[:at] == [said] * at
    assert bodies[bodies.index(b"cut") + 1] == b"end\n"
    assert bodies[-1] == dialect.stream_end
    num = len(bodies)
    await asyncio.sleep(0.2)
    assert len(bodies) == num


async def test_pauses_end_with_the_client(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lmkit_http.sse.SILENCE", 0.02)
    bodies: list[Any] = []

    async def send(message: Any) -> None:
        bodies.append(message)

    async def never() -> AsyncIterator[bytes]:
        await asyncio.Event().wait()
        yield b""

    left = asyncio.Event()

    async def receive() -> Any:
        await left.wait()
        return {"type": "http.disconnect"}

    monkeypatch.setattr("lmkit_http.sse.FIRST_WAIT", 0.01)
    serving = asyncio.ensure_future(
        EventResponse(never(), lambda _: None, lambda _: None, OpenAI(), {})({"type": "http"}, receive, send)
    )
    async with asyncio.timeout(20):
        while len(bodies) < 3:
            await asyncio.sleep(0.01)
    left.set()
    await serving
    num = len(bodies)
    await asyncio.sleep(0.1)
    assert len(bodies) == num


SAY = [{"role": "user", "content": "Hello"}]
STREAMS = [
    ("/v1/chat/completions", {"messages": SAY, "stream": True}),
    ("/v1/completions", {"prompt": "a", "stream": True}),
    ("/v1/messages", {"messages": SAY, "max_tokens": 8, "stream": True}),
    ("/v1/responses", {"input": "Hello", "stream": True}),
    ("/api/chat", {"messages": SAY, "stream": True}),
    ("/api/generate", {"prompt": "Hello"}),
    ("/inference/v1/generate", {"token_ids": [5, 6], "sampling_params": {"max_tokens": 4}, "stream": True}),
    ("/invocations", {"messages": SAY, "stream": True}),
]


@pytest.mark.parametrize(("path", "body"), STREAMS, ids=[path for path, _ in STREAMS])
async def test_parsers_do_not_see_that_a_stream_waits(
    monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any]
) -> None:
    """The events of each dialect are the same beside and without what is said in between."""
    monkeypatch.setattr("lmkit_http.sse.FIRST_WAIT", 0.01)
    told = []
    for silence in (0.02, 60.0):
        monkeypatch.setattr("lmkit_http.sse.SILENCE", silence)
        llm = scripted("abcd", delay=0.2)
        async with listening(llm) as url, httpx.AsyncClient(base_url=url, timeout=60) as client:
            sent = {**body, "model": llm.facts.model}
            async with client.stream("POST", path, json=sent) as response:
                assert response.status_code == 200, await response.aread()
                text = (await response.aread()).decode()
        quiet = text.replace(": waiting\n\n", "").replace('event: ping\ndata: {"type": "ping"}\n\n', "")
        if response.headers["content-type"].startswith("application/x-ndjson"):
            lines = text.splitlines()
            assert all(json.loads(line) for line in lines)
            assert (text != "\n".join(line.strip() for line in lines) + "\n") == (silence < 1)
            told.append(len(lines))
        else:
            assert (quiet != text) == (silence < 1)
            told.append(quiet.count("data: "))
            assert all(part.startswith(("data: ", "event: ")) for part in quiet.split("\n\n") if part)
    assert told[0] == told[1]

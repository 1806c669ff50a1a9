"""What a connection may cost before, beside and after its requests: bytes, time, and answers that nobody reads."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from types import SimpleNamespace
from typing import Any

import pytest
from lmkit_http.protocol import BoundedProtocol
from lmkit_http.settings import ServerSettings
from lmkit_testing.serving import listening, scripted

KEYS = ServerSettings(port=0, api_keys=("secret",))
POST = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"
BODY = json.dumps({"prompt": "a"}).encode()


@asynccontextmanager
async def connected(url: str) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        yield reader, writer
    finally:
        writer.transport.abort()
        with suppress(OSError):
            await writer.wait_closed()


async def until_closed(writer: asyncio.StreamWriter, data: bytes, most: int = 1 << 30) -> int:
    """Bytes that could be sent before the server closed the connection, or took no more."""
    sent = 0
    try:
        while sent < most:
            writer.write(data)
            sent += len(data)
            await asyncio.wait_for(writer.drain(), 1)
            await asyncio.sleep(0)
    except OSError:
        pass
    return sent


@pytest.mark.parametrize(
    ("start", "more"),
    [
        (CHUNKED + b"1\r\n{\r\n0\r\n", b"X-T: " + b"a" * 4000 + b"\r\n"),  # many trailers
        (CHUNKED + b"1\r\n{\r\n0\r\nX-T: ", b"a" * 4000),  # one without end
        (CHUNKED + b"1;x=", b"a" * 4000),  # an extension without end
        (POST + b"X: ", b"a" * 4000),  # a header without end
        (b"POST /", b"a" * 4000),  # a target without end
        (POST, b"X-T: a\r\n" * 500),  # many headers
    ],
)  # fmt: skip
@pytest.mark.parametrize("settings", [KEYS, ServerSettings(port=0)], ids=["key", "open"])
async def test_nothing_but_a_body_is_long(
    monkeypatch: pytest.MonkeyPatch, settings: ServerSettings, start: bytes, more: bytes
) -> None:
    monkeypatch.setattr("lmkit_http.protocol.LINGER_SECONDS", 0.1)
    async with listening(scripted("a"), settings) as url, connected(url) as (_, writer):
        writer.write(start)
        assert await until_closed(writer, more) < 1 << 30


async def test_trailers_are_dropped() -> None:
    async with listening(scripted("abc")) as url, connected(url) as (reader, writer):
        writer.write(CHUNKED + b"%x\r\n%b\r\n0\r\nHost: evil\r\nX: y\r\n\r\n" % (len(BODY), BODY))
        assert (await reader.readline()).split()[1] == b"200"


async def test_a_body_in_tiny_chunks() -> None:
    body = json.dumps({"prompt": "a" * 2000, "max_tokens": 1}).encode()
    async with listening(scripted("abc")) as url, connected(url) as (reader, writer):
        writer.write(CHUNKED + b"".join(b"1\r\n%c\r\n" % c for c in body * 20)[:100_000])
        del body
        await asyncio.sleep(0)
        writer.write(b"0\r\n\r\n")
        assert (await reader.readline()).split()[1] == b"400"  # twenty values are not one; but it was read


async def test_a_refusal_closes_what_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """The client gets to read it, and what it goes on sending is thrown away."""
    monkeypatch.setattr("lmkit_http.protocol.LINGER_SECONDS", 0.2)
    async with listening(scripted("a"), KEYS) as url:
        for head in (CHUNKED, POST + b"Content-Length: 1000000\r\n\r\n"):
            async with connected(url) as (reader, writer):
                writer.write(head + b"1\r\n{\r\n")
                assert (await reader.readline()).split()[1] == b"401"
                assert b"invalid_api_key" in await asyncio.wait_for(reader.read(), 5)  # until its end
                assert await until_closed(writer, b"x" * 1000) < 1 << 30


async def read_answer(reader: asyncio.StreamReader) -> tuple[bytes, bytes]:
    """Head, in small letters, and body of one answer that says its length."""
    head = (await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5)).lower()
    length = int(head.partition(b"content-length: ")[2].split()[0])
    return head, await asyncio.wait_for(reader.readexactly(length), 5)


UNREAD = {
    "chunked": CHUNKED + b"1\r\n{\r\n",
    "long": POST + b"Content-Length: 1000000\r\n\r\n{",
    "expects": POST + b"Content-Length: 10\r\nExpect: 100-continue\r\n\r\n",
    "last": POST + b"Content-Length: 10\r\nConnection: close\r\n\r\n{",
    "old": b"POST /v1/completions HTTP/1.0\r\nHost: x\r\nContent-Length: 10\r\n\r\n{",
}


@pytest.mark.parametrize("sent", UNREAD.values(), ids=UNREAD)
async def test_a_refusal_before_the_body_says_that_the_connection_ends(
    monkeypatch: pytest.MonkeyPatch, sent: bytes
) -> None:
    """Once, and what the client sends until it has read that neither counts as a request nor resets the answer."""
    monkeypatch.setattr("lmkit_http.protocol.LINGER_SECONDS", 0.2)
    async with listening(scripted("a"), KEYS) as url, connected(url) as (reader, writer):
        writer.write(sent)
        head, body = await read_answer(reader)
        assert head.split()[1] == b"401"
        assert head.count(b"connection: close") == 1
        assert b"invalid_api_key" in body
        writer.write(b"GET /live HTTP/1.1\r\nHost: x\r\n\r\n")
        assert await asyncio.wait_for(reader.read(), 5) == b""


@pytest.mark.parametrize("late", [0.0, 0.1])
async def test_a_short_body_that_comes_after_its_refusal_is_skipped(late: float) -> None:
    """The connection goes on, and with it what follows in the same bytes."""
    live = b"GET /live HTTP/1.1\r\nHost: x\r\n\r\n"
    async with listening(scripted("a"), KEYS) as url, connected(url) as (reader, writer):
        for _ in range(3):
            writer.write(POST + b"Content-Length: %d\r\n\r\n" % len(live) + live[:5])
            head, _ = await read_answer(reader)
            assert head.split()[1] == b"401"
            assert b"connection: close" not in head
            writer.write(live[5:20])  # a body that looks like a request is none
            await asyncio.sleep(late)
            writer.write(live[20:] + live * 2)
            for _ in range(2):
                head, body = await read_answer(reader)
                assert head.split()[1] == b"200"
                assert body == b'{"status":"live"}'


async def test_a_rest_that_does_not_come_ends_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether the client is silent or sends a byte now and then."""
    monkeypatch.setattr("lmkit_http.protocol.HEAD_SECONDS", 0.3)
    async with listening(scripted("a"), KEYS) as url, connected(url) as (reader, writer):
        writer.write(POST + b"Content-Length: 1000\r\n\r\n")
        await read_answer(reader)
        async with asyncio.timeout(5):
            with suppress(OSError):
                while not reader.at_eof():
                    writer.write(b"x")
                    await asyncio.sleep(0.05)


async def test_who_is_skipped_is_not_cut_while_the_next_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time of an idle connection does not run while a request of it does."""
    before = BoundedProtocol.connection_made

    def hasty(self: Any, transport: Any) -> None:
        before(self, transport)
        self.timeout_keep_alive = 0.2

    monkeypatch.setattr(BoundedProtocol, "connection_made", hasty)
    async with listening(scripted("x" * 60, delay=0.01), KEYS) as url, connected(url) as (reader, writer):
        writer.write(POST + b"Content-Length: 4\r\n\r\n")
        await read_answer(reader)
        body = json.dumps({"prompt": "a", "max_tokens": 60}).encode()
        post = POST + b"Authorization: Bearer secret\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
        writer.write(b"null" + post)
        assert (await read_answer(reader))[0].split()[1] == b"200"


async def test_a_refusal_waits_for_its_turn_in_a_pipeline() -> None:
    """Before it answers, after it an end: what follows is not taken."""
    llm = scripted("abc")
    async with listening(llm, KEYS) as url, connected(url) as (reader, writer):
        good = b"Authorization: Bearer secret\r\nContent-Length: %d\r\n\r\n%b" % (len(BODY), BODY)
        writer.write(POST + good + POST + b"Content-Length: 2\r\n\r\n{}" + POST + good + UNREAD["long"] + POST + good)
        found = [(await read_answer(reader))[0].split()[1] for _ in range(4)]
        assert found == [b"200", b"401", b"200", b"401"]
        assert await asyncio.wait_for(reader.read(), 5) == b""
    assert len(llm.client.requests) == 2  # type: ignore[attr-defined]


async def test_a_refused_request_that_was_read_keeps_its_connection() -> None:
    async with listening(scripted("a"), KEYS) as url, connected(url) as (reader, writer):
        for _ in range(3):
            writer.write(POST + b"Content-Length: %d\r\n\r\n%b" % (len(BODY), BODY))
            head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5)
            assert head.split()[1] == b"401"
            length = int(head.lower().partition(b"content-length: ")[2].split()[0])
            await reader.readexactly(length)


async def test_a_pipeline_is_answered_in_order_and_piece_by_piece() -> None:
    most = 0
    kept: list[Any] = []
    async with listening(scripted("a"), on_app=kept.append) as url, connected(url) as (reader, writer):
        before = BoundedProtocol._start_asgi_task

        def watch(self: Any, *args: Any) -> Any:
            nonlocal most
            most = max(most, len(self.pipeline))
            return before(self, *args)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(BoundedProtocol, "_start_asgi_task", watch)
            num = 2000
            request = b"GET /live HTTP/1.1\r\nHost: x\r\n\r\n"
            writer.write(request * num + POST + b"Content-Length: %d\r\n\r\n%b" % (len(BODY), BODY))
            for _ in range(num):
                head = await asyncio.wait_for(reader.readuntil(b'{"status":"live"}'), 10)
                assert head.startswith(b"HTTP/1.1 200")
            assert b"text_completion" in await asyncio.wait_for(reader.readuntil(b"}]"), 10)
    assert most <= (16 << 10) // len(request) + 1


@pytest.mark.usefixtures("small_buffers")
async def test_what_waits_behind_a_running_request_is_bounded() -> None:
    llm = scripted("x" * 200, delay=0.01)
    async with listening(llm) as url, connected(url) as (_, writer):
        body = json.dumps({"prompt": "a", "max_tokens": 2000}).encode()
        writer.write(POST + b"Content-Length: %d\r\n\r\n%b" % (len(body), body))
        requests = b"GET /live HTTP/1.1\r\nHost: x\r\n\r\n" * 1000
        assert await until_closed(writer, requests, 64 << 20) < 64 << 20


@pytest.mark.parametrize(
    ("request_line", "hosts", "status"),
    [
        (b"GET /live", [b"x"], b"200"),
        (b"GET /live", [b"x", b"x"], b"400"),
        (b"GET /live", [b"x", b"evil"], b"400"),
        (b"GET http://x/live", [b"x"], b"200"),
        (b"GET http://x:80/live", [b"X:80"], b"200"),
        (b"GET http://evil/live", [b"x"], b"400"),
        (b"GET http://[::1]/live", [b"[::1]:80"], b"200"),
        (b"GET http://[::1]/live", [b"localhost"], b"400"),
    ],
)
async def test_one_host(request_line: bytes, hosts: list[bytes], status: bytes) -> None:
    async with listening(scripted("a")) as url, connected(url) as (reader, writer):
        writer.write(request_line + b" HTTP/1.1\r\n" + b"".join(b"Host: %b\r\n" % h for h in hosts) + b"\r\n")
        assert (await asyncio.wait_for(reader.readline(), 5)).split()[1] == status


@pytest.mark.usefixtures("small_buffers")
async def test_answers_that_nobody_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their connection ends, and with it their request."""
    monkeypatch.setattr("lmkit_http.protocol.WRITE_SECONDS", 0.2)
    llm = scripted("x" * 3000, max_length=1 << 20)
    kept: list[Any] = []
    body = json.dumps({"prompt": "a", "stream": True, "logprobs": 20, "n": 16, "max_tokens": 3000}).encode()
    async with listening(llm, on_app=kept.append) as url, connected(url) as (_, writer):
        writer.write(POST + b"Content-Length: %d\r\n\r\n%b" % (len(body), body))
        backend = kept[0].state.backend
        async with asyncio.timeout(20):
            while not llm.client.requests:  # type: ignore[attr-defined]
                await asyncio.sleep(0.01)
            while backend.running:
                await asyncio.sleep(0.01)
    assert llm.client.aborted  # type: ignore[attr-defined]


async def test_a_head_behind_a_running_request_has_its_own_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """It begins when its turn has come, so that a long answer is not cut; and it does end."""
    monkeypatch.setattr("lmkit_http.protocol.HEAD_SECONDS", 0.3)
    monkeypatch.setattr("lmkit_http.protocol._SLICE", 64)
    async with listening(scripted("x" * 60, delay=0.01)) as url, connected(url) as (reader, writer):
        body = json.dumps({"prompt": "a", "max_tokens": 60}).encode()
        post = POST + b"Content-Length: %d\r\n\r\n%b" % (len(body), body)
        writer.write(post * 2 + POST + b"X-Unfinished: ")
        for _ in range(2):
            head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 10)
            assert head.split()[1] == b"200"
            await reader.readuntil(b"}}")
        assert await asyncio.wait_for(reader.read(), 10) is not None  # then it is closed


@pytest.mark.parametrize(("seconds", "stays"), [(0.1, False), (75.0, True)])
async def test_how_long_an_idle_connection_is_kept(seconds: float, stays: bool) -> None:
    """By default longer than clients and proxies keep theirs, which then do not post on one that is closing."""
    assert ServerSettings().keep_alive > 60
    async with (
        listening(scripted("a"), ServerSettings(port=0, keep_alive=seconds)) as url,
        connected(url) as (reader, writer),
    ):
        writer.write(b"GET /live HTTP/1.1\r\nHost: x\r\n\r\n")
        await reader.readuntil(b"}")
        ended = asyncio.ensure_future(reader.read())
        done, _ = await asyncio.wait([ended], timeout=0.6 if stays else 20)
        assert bool(done) != stays
        ended.cancel()


@pytest.mark.parametrize("closing", [False, True])
async def test_nothing_is_written_to_a_connection_that_was_aborted(closing: bool) -> None:
    """As one is whose pipeline is too long, while an answer is on its way: the exchange learns of it a turn later."""
    protocol: Any = BoundedProtocol.__new__(BoundedProtocol)
    protocol.transport = SimpleNamespace(is_closing=lambda: closing)
    cycle: Any = SimpleNamespace(response_started=False, more_body=False, disconnected=False)
    seen: list[bool] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200})

    async def send(message: Any) -> None:
        seen.append(cycle.disconnected)

    await protocol._answer(cycle, app, {}, None, send)
    assert seen == [closing]

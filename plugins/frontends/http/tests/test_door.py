"""What has no room is refused at the door, as the routes would: the same words, and a connection that goes on."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest
from lmkit_http.dialects import installed_dialects
from lmkit_http.door import Door
from lmkit_http.settings import ServerSettings
from lmkit_testing.serving import ServedLLM, listening, scripted

KEYS = ServerSettings(port=0, api_keys=("secret",))
PATHS = sorted({route.split(" ")[1] for dialect in installed_dialects() for route in dialect.routes
                if route.startswith("POST") and "{" not in route})  # fmt: skip
MANY = 10**6  # requests that are in


@asynccontextmanager
async def served(
    llm: ServedLLM, settings: ServerSettings = KEYS
) -> AsyncIterator[tuple[Any, asyncio.StreamReader, asyncio.StreamWriter]]:
    """The application's backend, and a connection to it."""
    apps: list[Any] = []
    async with listening(llm, settings, apps.append) as url:
        host, port = url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        try:
            yield apps[0].state.backend, reader, writer
        finally:
            writer.transport.abort()
            with suppress(OSError):
                await writer.wait_closed()


def post(path: str, body: bytes = b"{}", head: str = "Authorization: Bearer secret\r\n") -> bytes:
    return f"POST {path} HTTP/1.1\r\nHost: x\r\n{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


async def answer(reader: asyncio.StreamReader) -> tuple[int, dict[str, str], Any]:
    """Status, headers, body."""
    head = (await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5)).decode().split("\r\n")
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in head[1:] if line)}
    body = await reader.readexactly(int(headers["content-length"]))
    return int(head[0].split(" ")[1]), headers, json.loads(body)


@pytest.fixture
def at_door(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Paths of what was refused at the door."""
    found = []
    written = Door._written

    def note(self: Door, error: Any, dialect: Any, path: str, headers: Any) -> Any:
        found.append(path)
        return written(self, error, dialect, path, headers)

    monkeypatch.setattr(Door, "_written", note)
    return found


@pytest.mark.parametrize("mark", ["", "anthropic-version: 2023-06-01\r\n"], ids=["plain", "marked"])
async def test_it_says_what_the_routes_say(at_door: list[str], mark: str) -> None:
    async with served(scripted("a")) as (backend, reader, writer):
        backend.num_preparing = MANY
        for path in PATHS:
            head = f"Authorization: Bearer secret\r\n{mark}"
            writer.write(post(path, head=head))
            status, headers, body = await answer(reader)
            assert at_door == [path]
            at_door.clear()
            writer.write(post(path, head=f"{head}Origin: http://x\r\n"))  # which the door leaves alone
            assert not at_door
            other_status, other_headers, other = await answer(reader)
            assert (status, body, set(headers)) == (other_status, other, set(other_headers))
            assert headers["content-type"] == other_headers["content-type"]
            assert status == 503


async def test_who_may_not_ask_does_not_learn_that_it_is_full(at_door: list[str]) -> None:
    async with served(scripted("a")) as (backend, reader, writer):
        backend.num_preparing = MANY
        for head in ("", "Authorization: Bearer other\r\n", "Authorization: Basic secret\r\nX-Api-Key: other\r\n"):
            writer.write(post("/v1/completions", head=head))
            assert (await answer(reader))[0] == 401
        writer.write(post("/v1/nothing"))
        assert (await answer(reader))[0] == 404
    assert not at_door


async def test_the_connection_goes_on(at_door: list[str]) -> None:
    """With bodies that come late, and look like requests; with what is behind them in the same bytes."""
    llm = scripted("abc")
    refused = post("/v1/completions", post("/v1/completions"))
    async with served(llm) as (backend, reader, writer):
        backend.num_preparing = MANY
        for cut in range(1, 3 * len(refused), 37):
            writer.write((refused * 3)[:cut])
            await asyncio.sleep(0)
            writer.write((refused * 3)[cut:])
            assert [(await answer(reader))[0] for _ in range(3)] == [503] * 3
        assert len(at_door) == 3 * len(range(1, 3 * len(refused), 37))
        backend.num_preparing = 0
        writer.write(post("/v1/completions", b'{"prompt": "a"}'))
        status, _, body = await answer(reader)
        assert (status, body["choices"][0]["text"]) == (200, "abc")
        writer.write(post("/v1/completions", b'{"prompt": "a"}') + refused)
        assert [(await answer(reader))[0] for _ in range(2)] == [200, 400]


async def test_what_follows_an_answer_waits_for_it() -> None:
    """Nothing is refused before the request in front of it has been answered."""
    async with served(scripted("abc", delay=0.05)) as (backend, reader, writer):
        writer.write(post("/v1/completions", b'{"prompt": "a"}'))
        async with asyncio.timeout(5):
            while not backend.running:
                await asyncio.sleep(0.001)
        backend.num_preparing += MANY
        writer.write(post("/v1/completions") * 2)
        assert [(await answer(reader))[0] for _ in range(3)] == [200, 503, 503]


@pytest.mark.parametrize("more", ["Transfer-Encoding: chunked\r\n", "Content-Length: 1000000\r\n",
                                  "Content-Length: 2\r\nConnection: close\r\n"])  # fmt: skip
async def test_what_ends_the_connection_is_left_to_the_routes(at_door: list[str], more: str) -> None:
    async with served(scripted("a")) as (backend, reader, writer):
        backend.num_preparing = MANY
        writer.write(f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nX-Api-Key: secret\r\n{more}\r\n1\r\n".encode())
        status, headers, _ = await answer(reader)
        assert (status, headers["connection"]) == (503, "close")
        assert await asyncio.wait_for(reader.read(), 5) == b""
    assert not at_door


async def test_a_body_that_does_not_come_ends_the_connection(
    monkeypatch: pytest.MonkeyPatch, at_door: list[str]
) -> None:
    monkeypatch.setattr("lmkit_http.protocol.HEAD_SECONDS", 0.2)
    async with served(scripted("a")) as (backend, reader, writer):
        backend.num_preparing = MANY
        writer.write(post("/v1/completions", b"{}")[:-1])
        assert (await answer(reader))[0] == 503
        assert await asyncio.wait_for(reader.read(), 5) == b""
    assert at_door


async def test_limits_of_keys(at_door: list[str]) -> None:
    settings = ServerSettings(port=0, api_keys=("secret", "other"), key_requests=1, root_path="/llm")
    async with served(scripted("abc"), settings) as (_, reader, writer):
        writer.write(post("/v1/completions", b'{"prompt": "a"}') + post("/llm/v1/completions"))
        assert (await answer(reader))[0] == 200
        status, headers, body = await answer(reader)
        assert (status, body["error"]["code"]) == (429, "rate_limit_exceeded")
        assert 59 <= int(headers["retry-after"]) <= 60
        writer.write(post("/v1/completions", b'{"prompt": "a"}', "Authorization: Bearer other\r\n"))
        assert (await answer(reader))[0] == 200
        writer.write(post("/llm/v1/completions"))
        assert (await answer(reader))[0] == 429
    assert at_door == ["/v1/completions"]  # the first one came behind a request that was being answered


async def test_refusals_are_counted_and_told_together(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("lmkit_http.door._EVERY", 0.1)
    with caplog.at_level(logging.INFO, "lmkit.access"):
        async with served(scripted("a")) as (backend, reader, writer):
            backend.num_preparing = MANY
            writer.write(post("/v1/completions") * 50)
            for _ in range(50):
                await answer(reader)
            await asyncio.sleep(0.2)
            assert b'lmkit_http_requests_total{route="/v1/completions",status="503"} 50.0' in backend.metrics.render(
                None, True
            )
    assert [r.getMessage() for r in caplog.records] == ["POST /v1/completions 503, 50 times within a second"]


async def test_of_a_burst_only_those_are_let_in_that_have_room(at_door: list[str]) -> None:
    """They are read together, before the first of them has taken its place."""
    async with served(scripted("abc", delay=0.05)) as (backend, reader, writer):
        backend.num_preparing = backend.admission._limit - 2
        host, port = writer.get_extra_info("peername")[:2]
        others = [await asyncio.open_connection(host, port) for _ in range(9)]
        for _, other in [*others, (reader, writer)]:
            other.write(post("/v1/completions", b'{"prompt": "a"}'))
        found = [(await answer(other))[0] for other, _ in [*others, (reader, writer)]]
        assert sorted(found) == [200] * 2 + [503] * 8
        assert len(at_door) == 8
        backend.num_preparing = 0
        writer.write(post("/v1/completions", b'{"prompt": "a"}'))
        assert (await answer(reader))[0] == 200
        for _, other in others:
            other.close()

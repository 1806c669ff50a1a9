"""Compressed bodies: read like plain ones, bounded by what comes out, at every split, and never for long at a time."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lmkit_http import encoding
from lmkit_http.encoding import PIECE, BrokenEncoding, decoder
from lmkit_http.settings import ServerSettings
from lmkit_testing.serving import scripted

HELLO = {"messages": [{"role": "user", "content": "Hello"}]}
CHAT = "/v1/chat/completions"
COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    "gzip": gzip.compress,
    "x-gzip": gzip.compress,
    "deflate": zlib.compress,
}
if encoding._zstd is not None:
    COMPRESS["zstd"] = encoding._zstd.compress


def plain(name: str, *parts: bytes) -> bytes:
    reader = decoder(name)
    pieces = [piece for part in parts for piece in reader.feed(part)]
    reader.end()
    assert all(len(piece) <= PIECE for piece in pieces)
    return b"".join(pieces)


@pytest.mark.parametrize("name", COMPRESS)
def test_at_every_split(name: str) -> None:
    data = json.dumps([HELLO, list(range(50))]).encode()
    sent = COMPRESS[name](data)
    for at in range(len(sent) + 1):
        assert plain(name, sent[:at], sent[at:]) == data
    assert plain(name, *(bytes([byte]) for byte in sent)) == data
    assert plain(name.upper(), sent) == data


@pytest.mark.parametrize("name", COMPRESS)
@given(data=st.binary(max_size=300), junk=st.binary(min_size=1, max_size=20), cut=st.integers(1, 300))
def test_what_is_not_whole_is_refused(name: str, data: bytes, junk: bytes, cut: int) -> None:
    sent = COMPRESS[name](data)
    assert plain(name, sent) == data
    for broken in (sent[:-cut], sent + junk, junk + sent):
        with suppress(BrokenEncoding):
            assert plain(name, broken) != data


@pytest.mark.parametrize("name", COMPRESS)
@pytest.mark.parametrize("size", [PIECE - 1, PIECE, PIECE + 1, 4 * PIECE])
def test_large_bodies_come_in_pieces(name: str, size: int) -> None:
    assert plain(name, COMPRESS[name](b"a" * size)) == b"a" * size


@pytest.mark.parametrize("name", [*COMPRESS, "identity", ""])
async def test_a_body_is_read(connect: Any, name: str) -> None:
    llm = scripted("abc")
    body = COMPRESS.get(name, bytes)(json.dumps(HELLO).encode())
    headers = {"Content-Encoding": name, "Content-Type": "application/json"}
    response = await connect(llm).post(CHAT, content=body, headers=headers)
    assert response.status_code == 200, response.text
    assert response.json()["choices"][0]["message"]["content"] == "abc"


@pytest.mark.parametrize("name", COMPRESS)
async def test_a_bomb_ends_at_the_limit_of_bodies(connect: Any, name: str) -> None:
    """As many bytes as a body may have come out of it, and a piece more."""
    bomb = COMPRESS[name](b" " * (64 << 20))
    assert len(bomb) < 200_000
    client = connect(scripted("abc"), ServerSettings(max_body=1 << 20))
    for path in (CHAT, "/tokenize", "/v1/completions"):
        response = await client.post(path, content=bomb, headers={"Content-Encoding": name})
        assert (response.status_code, response.json()["error"]["code"]) == (413, "body-too-large")


async def test_bytes_that_are_not_what_they_should_be(connect: Any) -> None:
    client = connect(scripted("abc"))
    for body in (b"{}", gzip.compress(b"{}")[:-3], gzip.compress(b"{}") + b"x", b""):
        response = await client.post(CHAT, content=body, headers={"Content-Encoding": "gzip"})
        assert (response.status_code, response.json()["error"]["code"]) == (400, "broken-encoding")


async def test_bombs_together_have_one_room(connect: Any) -> None:
    """What comes out counts, not what was sent."""
    settings = ServerSettings(max_body=1 << 20, max_bodies=1 << 20)
    client = connect(scripted("abc"), settings)
    bodies = client._transport.app.state.backend.bodies
    bodies.num_bytes = 1 << 20  # others have it all
    body = gzip.compress(json.dumps(HELLO).encode() + b" " * 200_000)
    response = await client.post(CHAT, content=body, headers={"Content-Encoding": "gzip"})
    assert (response.status_code, response.json()["error"]["code"]) == (503, "engine-busy")
    assert bodies.num_bytes == 1 << 20

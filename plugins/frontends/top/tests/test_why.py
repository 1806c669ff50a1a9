"""The story of a request, told by a real application and shown on a terminal."""

from __future__ import annotations

from io import StringIO
from typing import Any

import httpx
import msgspec
import pytest
from lmkit.api import EngineError
from lmkit_http.app import build_app
from lmkit_testing.serving import hashed, scripted
from lmkit_top.server import Server
from lmkit_top.why import Choice, Other, Story, ask, lines, shown
from rich.console import Console


async def story(llm: Any, *prompts: str) -> bytes:
    """What the server says of the last of these prompts."""
    transport = httpx.ASGITransport(build_app(llm))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        for i, prompt in enumerate(prompts):
            body = {"prompt": prompt, "max_tokens": 4, "temperature": 0, "ignore_eos": True, "request_id": f"r{i}"}
            assert (await client.post("/v1/completions", json=body)).status_code == 200
        return (await client.get(f"/debug/requests/r{len(prompts) - 1}")).content


def text_of(story: Story) -> str:
    console = Console(width=100, record=True, file=StringIO())
    console.print(shown(story))
    return console.export_text()


async def test_a_life_fits_on_a_screen() -> None:
    async with hashed(block_size=4) as llm:
        data = await story(llm, "abcdefghijkl", "abcdefXhijkl")
    text = text_of(msgspec.json.decode(data, type=Story))
    assert "8 of 12 tokens computed in one step" in text
    assert "4 tokens found: it parts from request" in text
    assert "at position 6" in text
    assert "4 tokens" in text
    assert "length, after" in text
    assert len(text.splitlines()) <= 24


def made(**changes: Any) -> Choice:
    """A choice with everything in it."""
    said = {
        "index": 0, "adapter": "law", "finish": "error", "error": "engine-dead",
        "usage": {"prompt_tokens": 90, "cached_tokens": 64, "computed_tokens": 26, "completion_tokens": 11,
                  "reasoning_tokens": 3, "draft_tokens": 8, "accepted_draft_tokens": 5},
        "seconds": {"queue": 0.25, "prefill": 0.5, "decode": 1.0, "stalled": 0.125, "total": 2.0},
        "prefill_steps": 3, "preemptions": 2, "decode_tokens_per_second": 10.0, "cache": {"text": "never seen"},
        "waited_for": [{"id": "a", "prompt_tokens": 7, "completion_tokens": 9}, {"more": 4}], "kept_waiting": [],
    }  # fmt: skip
    return msgspec.convert(said | changes, Choice)


def test_everything_that_happened_is_a_line() -> None:
    rows = dict(lines(made()))
    assert rows["queue"] == "250 ms"
    assert rows["waited for"] == "a (7 + 9 tokens), 4 more"
    assert rows["prompt"] == "500 ms: 26 of 90 tokens computed in 3 steps"
    assert rows["drafts"] == "5 of 8 guessed tokens were right"
    assert rows["decode"] == "1 s: 11 tokens, 10 a second, 3 of them reasoning"
    assert rows["preempted"] == "2 times, 125 ms in the queue again"
    assert rows["ended"] == "error (engine-dead), after 2 s"
    assert "kept waiting" not in rows


def test_ids_of_clients_do_not_steer_the_terminal() -> None:
    evil = Story("\x1b[2Jid", "r\n", "/v1/x", "[red]m", False, [made(waited_for=[Other("\x1b]0;x\x07", 1, 1)])])
    text = text_of(evil)
    assert "\x1b" not in text
    assert "\x07" not in text
    assert "[red]m" in text


class Answering(Server):
    """A server whose answers are at hand."""

    def __init__(self, status: int, body: bytes) -> None:
        super().__init__("http://localhost")
        self._http = httpx.Client(transport=httpx.MockTransport(lambda _: httpx.Response(status, content=body)))


async def test_what_is_not_known_is_said_in_the_words_of_the_server() -> None:
    transport = httpx.ASGITransport(build_app(scripted("a")))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        body = (await client.get("/debug/requests/nobody")).content
    with pytest.raises(EngineError, match="'nobody' is remembered") as found, Answering(404, body) as server:
        ask(server, "nobody")
    assert "by their id or x-request-id" in found.value.message


@pytest.mark.parametrize(
    ("status", "body", "words"),
    [(401, b"", "wants a key"), (404, b"<html>", "404"), (500, b'{"error": 3}', "500"), (200, b"{}", "is no story")],
)
def test_other_answers_are_typed_errors(status: int, body: bytes, words: str) -> None:
    with pytest.raises(EngineError, match=words), Answering(status, body) as server:
        ask(server, "a/b")


async def test_fields_that_were_dropped_are_named() -> None:
    transport = httpx.ASGITransport(build_app(scripted("ok")))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        body = {"prompt": "x", "request_id": "r", "user": "u", "stream_options": {"nobody_knows": 1}, "stream": True}
        assert (await client.post("/v1/completions", json=body)).status_code == 200
        data = (await client.get("/debug/requests/r")).content
    assert "dropped fields: stream_options.nobody_knows, user" in text_of(msgspec.json.decode(data, type=Story))

"""The front against servers that are functions: who is asked for what, and who answers when others are gone."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from lmkit_split.app import Server, Split, make_app
from lmkit_split.prompts import LIMITS, prompt_only

LONG = {"model": "m", "prompt": "x" * 5000, "max_tokens": 50, "stream": True, "n": 2, "temperature": 0.5}
Asked = list[tuple[str, dict[str, Any]]]


class Fakes(httpx.AsyncBaseTransport):
    """Servers by name; those in `gone` cannot be reached."""

    def __init__(self) -> None:
        self.asked: Asked = []
        self.gone: set[str] = set()
        self.breaks: set[str] = set()
        self.statuses: dict[str, int] = {}
        self.slow: set[str] = set()
        self.torn: set[str] = set()

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        name = request.url.host
        if name in self.gone:
            raise httpx.ConnectError("refused")
        if name in self.torn:
            raise AttributeError("what a library says of a connection that was torn down under it")
        if name in self.slow:
            raise httpx.ReadTimeout("slow")
        body = await request.aread()
        self.asked.append((name, json.loads(body) if body else {}))

        async def parts() -> AsyncIterator[bytes]:
            yield name.encode()
            if name in self.breaks:
                raise httpx.ReadError("broken off")
            yield b" done"

        return httpx.Response(self.statuses.get(name, 200), headers={"x-from": name}, content=parts())

    def names(self) -> list[str]:
        return [name for name, _ in self.asked]


def ask(fakes: Fakes, *bodies: dict[str, Any], path: str = "/v1/completions", **options: Any) -> list[httpx.Response]:
    """Answers of one front, one after the other."""

    async def run() -> list[httpx.Response]:
        split = Split([Server("http://p")], [Server("http://d"), Server("http://e")], transport=fakes, **options)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(make_app(split)), base_url="http://front") as client:
            found = [await client.post(path, json=body) for body in bodies]
        assert [server.running for server in (*split.prefill, *split.decode)] == [0, 0, 0]
        return found

    return asyncio.run(run())


def test_the_prompt_is_computed_first() -> None:
    fakes = Fakes()
    (answer,) = ask(fakes, LONG)
    assert fakes.asked == [("p", {**LONG, "max_tokens": 1, "stream": False, "n": 1}), ("d", LONG)]
    assert (answer.text, answer.headers["x-from"]) == ("d done", "d")


@pytest.mark.parametrize(
    ("path", "body"), [("/v1/completions", {"prompt": "short"}), ("/v1/embeddings", {"input": "x" * 5000})]
)
def test_others_go_straight_to_a_decode_server(path: str, body: dict[str, Any]) -> None:
    fakes = Fakes()
    ask(fakes, body, path=path)
    assert fakes.asked == [("d", body)]


def test_a_prefill_server_that_is_gone_is_not_asked_again() -> None:
    fakes = Fakes()
    fakes.gone = {"p"}
    answers = ask(fakes, LONG, LONG)
    assert [answer.text for answer in answers] == ["d done"] * 2
    assert fakes.names() == ["d", "d"]


@pytest.mark.parametrize("how", ["refuses", "slow"])
def test_what_the_prefill_server_says_does_not_matter(how: str) -> None:
    fakes = Fakes()
    fakes.statuses, fakes.slow = ({"p": 503}, set()) if how == "refuses" else ({}, {"p"})
    (answer,) = ask(fakes, LONG)
    assert (answer.status_code, answer.text) == (200, "d done")


def test_another_decode_server_answers_and_at_last_the_prefill_server() -> None:
    fakes = Fakes()
    fakes.gone = {"d"}
    assert ask(fakes, LONG)[0].text == "e done"
    fakes.gone = {"d", "e"}
    assert ask(fakes, LONG)[0].text == "p done"
    fakes.gone = {"d", "e", "p"}
    (answer,) = ask(fakes, LONG)
    assert (answer.status_code, answer.json()["error"]["code"]) == (502, 502)


def test_any_error_before_an_answer_is_that_of_a_server_that_is_gone() -> None:
    fakes = Fakes()
    fakes.torn = {"p", "d"}
    assert ask(fakes, LONG)[0].text == "e done"


def test_an_answer_that_breaks_off_is_not_repeated() -> None:
    fakes = Fakes()
    fakes.breaks = {"d"}
    with pytest.raises(httpx.HTTPError):
        ask(fakes, LONG)
    assert fakes.names() == ["p", "d"]


def test_errors_of_servers_go_through() -> None:
    fakes = Fakes()
    fakes.statuses = {"d": 400}
    assert ask(fakes, {"prompt": 5})[0].status_code == 400


def test_a_body_that_is_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lmkit_split.app.MOST_BYTES", 1000)
    fakes = Fakes()
    assert ask(fakes, LONG)[0].status_code == 413
    assert not fakes.asked


@pytest.mark.parametrize("path", sorted(LIMITS))
def test_one_token_of_the_same_prompt(path: str) -> None:
    field = LIMITS[path][0]
    body = {"messages": [1], "tools": [2], field: 7, "stream": True, "stream_options": {}, "store": True}
    assert json.loads(prompt_only(path, json.dumps(body).encode()) or b"") == {
        "messages": [1], "tools": [2], field: 1, "stream": False,
    }  # fmt: skip


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b"\xff", b"5"])
def test_what_is_no_request_is_left_to_the_server(body: bytes) -> None:
    assert prompt_only("/v1/completions", body) is None

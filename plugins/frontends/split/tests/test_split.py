"""The front against servers that are functions: who is asked for what, and who answers when others are gone."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import typer
from lmkit.api import ConfigError
from lmkit_http.bounded import gated
from lmkit_http.settings import ServerSettings
from lmkit_split import command
from lmkit_split.app import Server, Split, make_app
from lmkit_split.prompts import LIMITS, prompt_only
from typer.testing import CliRunner

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
        self.raw = False  # bodies are not read

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        name = request.url.host
        if name in self.gone:
            raise httpx.ConnectError("refused")
        if name in self.torn:
            raise AttributeError("what a library says of a connection that was torn down under it")
        if name in self.slow:
            raise httpx.ReadTimeout("slow")
        body = await request.aread()
        self.asked.append((name, json.loads(body) if body and not self.raw else {}))

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
    assert (answer.status_code, answer.json()["error"]["code"]) == (502, "unreachable")


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
    monkeypatch.setattr("lmkit_split.app.MOST_BODY", 1000)
    fakes = Fakes()
    assert ask(fakes, LONG)[0].status_code == 413
    assert not fakes.asked


# ------------------------------------------------------------------------------------ the bounds of every listener


def front(fakes: Fakes, **options: Any) -> tuple[Split, httpx.AsyncClient]:
    """A front behind the gate that every listener has."""
    split = Split([Server("http://p")], [Server("http://d")], transport=fakes)
    app = gated(make_app(split), ServerSettings(**options))
    return split, httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost:8000")


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200), ({"Host": "127.0.0.1:8000"}, 200), ({"Origin": "http://localhost:8000"}, 200),
        ({"Host": "evil.com"}, 421), ({"Origin": "http://evil.com"}, 403), ({"Origin": "null"}, 403),
        ({"X-Big": "x" * 70_000}, 431), ({"Content-Length": str(1 << 30)}, 413), ({"Content-Encoding": "br"}, 415),
    ],
)  # fmt: skip
async def test_hosts_origins_and_sizes_are_checked(headers: dict[str, str], status: int) -> None:
    """Servers behind see neither the Host nor the Origin: a page of the web would ask them through the front."""
    fakes = Fakes()
    _, client = front(fakes)
    for method, path in (("GET", "/v1/models"), ("GET", "/debug/requests"), ("POST", "/v1/completions")):
        response = await client.request(method, path, headers=headers)
        assert response.status_code == status, response.text
        assert response.headers["x-request-id"]
    assert len(fakes.asked) == (3 if status == 200 else 0)


async def test_keys_are_checked_and_passed_on() -> None:
    fakes = Fakes()
    _, client = front(fakes, api_keys=("secret",))
    assert (await client.get("/v1/models")).status_code == 401
    assert (await client.get("/v1/models", headers={"Authorization": "Bearer secret"})).status_code == 200
    assert (await client.get("/live")).status_code == 200


def test_a_public_address_needs_a_key() -> None:
    urls = ["--prefill", "http://127.0.0.1:1", "--decode", "http://127.0.0.1:2", "--port", "0"]
    app = typer.Typer()
    app.command()(command.split)
    result = CliRunner().invoke(app, [*urls, "--host", "0.0.0.0"])
    assert isinstance(result.exception, ConfigError)
    assert "--insecure" in result.exception.fix


@pytest.mark.parametrize(
    "body",
    [b'{"prompt": ' + b"[" * 5000 + b"]" * 5000 + b"}", b'{"a":' * 200_000, b'{"prompt": [' + b"{}," * 60_000 + b"0]}"],
    ids=["deep", "deeper", "many"],
)  # fmt: skip
async def test_odd_json_is_left_to_the_server_that_answers(body: bytes) -> None:
    assert prompt_only("/v1/completions", body) is None
    fakes = Fakes()
    fakes.raw = True
    _, client = front(fakes)
    assert (await client.post("/v1/completions", content=body)).status_code == 200
    assert fakes.names() == ["d"]


async def test_bodies_together_have_one_room() -> None:
    split, client = front(Fakes())
    split.bodies.num_bytes = 64 << 20  # half-sent ones of others
    assert (await client.post("/v1/completions", content=b"x" * 200_000)).status_code == 503
    split.bodies.num_bytes = 0
    split.running = 2048
    response = await client.post("/v1/completions", content=b"{}")
    assert (response.status_code, response.headers["retry-after"]) == (503, "1")


async def test_a_body_that_does_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lmkit_http.body.BODY_SECONDS", 0.05)
    _, client = front(Fakes())

    async def slow() -> AsyncIterator[bytes]:
        yield b"{"
        await asyncio.sleep(30)

    assert (await client.post("/v1/completions", content=slow())).status_code == 408


async def test_a_compressed_body_is_plain_behind() -> None:
    fakes = Fakes()
    _, client = front(fakes)
    body = gzip.compress(json.dumps({"prompt": "a"}).encode())
    assert (await client.post("/v1/completions", content=body, headers={"Content-Encoding": "gzip"})).status_code == 200
    assert fakes.asked == [("d", {"prompt": "a"})]


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

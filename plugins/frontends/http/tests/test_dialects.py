"""A dialect of somebody else's: a dist outside of the repository is served without a word about it anywhere."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from lmkit.api import EngineDead, ErrorInfo, PluginError, SamplingParams, UnknownKey
from lmkit.plugins.host import PluginHost
from lmkit_cli.health import examine
from lmkit_http.app import build_app
from lmkit_http.background import LAST
from lmkit_http.dialect import Answer, Dialect, Exchange, Incoming, Served, TextAsk, Turn
from lmkit_http.dialects import installed_dialects, load_dialects
from lmkit_http.settings import ServerSettings
from lmkit_testing.dists import write_dist
from lmkit_testing.host import DistDir, dist_dir
from lmkit_testing.serving import listening, scripted

__all__ = ["dist_dir"]

HOOKS = """
from lmkit.api import DialectSpec, hookimpl


@hookimpl
def lmkit_dialects():
    yield DialectSpec(name="echo", summary="Plain text", target="echo_dialect.dialect:Echo")
"""

DIALECT = """
from lmkit.api import SamplingParams
from lmkit_http.dialect import Dialect, Exchange, TextAsk


class EchoExchange(Exchange):
    media_type = "text/plain; charset=utf-8"

    def __init__(self, prompt, streamed, names):
        super().__init__(TextAsk(prompts=[prompt], params=SamplingParams(max_tokens=5, temperature=0.0)))
        self.streamed, self.prompt, self.name = streamed, prompt, names[0]

    def whole(self, turns):
        return f"{self.name} {self.prompt}: {turns[0].message.content}".encode()

    def chunk(self, turn, change):
        return change.content.encode()

    def end(self, turns):
        return b"."


class Echo(Dialect):
    routes = ("POST /echo", "POST /echo/stream")
    stream_type = "text/plain; charset=utf-8"

    def parse(self, incoming, served):
        return EchoExchange(incoming.body.decode(), incoming.route.endswith("stream"), served.names)

    def error(self, info):
        return f"no: {info.code}".encode()

    def error_chunk(self, info):
        return self.error(info)
"""


@pytest.fixture
def _echo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {"echo_dialect.hooks": HOOKS, "echo_dialect.dialect": DIALECT}
    write_dist(tmp_path, "echo-dialect", {"dialect": {"echo": "echo_dialect.hooks"}}, files)
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.mark.usefixtures("_echo")
async def test_a_dialect_from_outside_is_spoken() -> None:
    app = build_app(scripted("hello world", max_length=64), dialects=load_dialects(PluginHost()))
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        whole = await client.post("/echo", content="Hi")
        assert (whole.status_code, whole.text) == (200, "scripted Hi: hello")
        assert whole.headers["content-type"] == "text/plain; charset=utf-8"
        streamed = await client.post("/echo/stream", content="Hi")
        assert (streamed.status_code, streamed.text) == (200, "hello.")
        refused = await client.post("/echo", content="x" * 100)
        assert (refused.status_code, refused.text) == (400, "no: context_length_exceeded")
        body = {"prompt": "a", "max_tokens": 5}
        assert (await client.post("/v1/completions", json=body)).json()["choices"][0]["text"] == "hello"


@pytest.mark.full("lmkit-http", "lmkit-cli")
@pytest.mark.usefixtures("_echo")
def test_lmkit_serve_speaks_it(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "lmkit", "serve", "demo", "--port", "0", "--threads", "1", "--kv-memory", "8MiB"]
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    with subprocess.Popen(command, stderr=subprocess.PIPE, env=environment, text=True) as server:
        assert server.stderr is not None
        address = next((word for line in server.stderr for word in line.split() if word.startswith("http://")), "")
        assert address.endswith("/v1")
        answer = httpx.post(address.removesuffix("/v1") + "/echo", content="Hi", timeout=60)
        server.send_signal(signal.SIGTERM)
        server.stderr.read()
    assert answer.status_code == 200
    assert answer.text.startswith("demo Hi: ")


def test_two_dialects_for_one_route(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("one", "two"):
        files = {
            f"{name}_dialect.hooks": HOOKS.replace("echo", name),
            f"{name}_dialect.dialect": DIALECT,
        }
        write_dist(tmp_path, f"{name}-dialect", {"dialect": {name: f"{name}_dialect.hooks"}}, files)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(PluginError, match="both answer POST /echo"):
        load_dialects(PluginHost())


def _install(folder: Path, name: str, dialect: str = DIALECT) -> None:
    """A third-party dist with the dialect `name`."""
    files = {f"{name}_dialect.hooks": HOOKS.replace("echo", name), f"{name}_dialect.dialect": dialect}
    write_dist(folder, f"{name}-dialect", {"dialect": {name: f"{name}_dialect.hooks"}}, files)


TAKEN = [
    ("POST /v1/chat/completions", "", "dialect 'openai'"),
    ("POST /v1/embeddings", "", "dialect 'pooling'"),
    ("GET /health", "", "the server"),
    ("GET /v1/models/mine", "", "the server"),
    ("POST /v1/messages", 'mark = "anthropic-version"', "dialect 'anthropic'"),
    ("POST /v1/messages", "", "dialect 'anthropic'"),
]


@pytest.mark.parametrize(("route", "mark", "owner"), TAKEN)
@pytest.mark.parametrize("name", ["aaa", "zzz"])
def test_a_route_of_ours_stays_ours(
    dist_dir: DistDir, caplog: pytest.LogCaptureFixture, name: str, route: str, mark: str,
    owner: str,
) -> None:  # fmt: skip
    """B1: whatever name a third-party dialect has, the start goes on, with a warning that names it."""
    dialect = DIALECT.replace('"POST /echo", ', f'"POST /echo", "{route}", ').replace(
        "    stream_type", f"    {mark}\n    stream_type", 1
    )
    _install(dist_dir.path, name, dialect)
    with caplog.at_level(logging.WARNING, "lmkit"):
        dialects = load_dialects(PluginHost())
    echo = next(dialect for dialect in dialects if type(dialect).__name__ == "Echo")
    assert echo.routes == ("POST /echo", "POST /echo/stream")
    (said,) = [r.getMessage() for r in caplog.records if "stays with lmkit's own" in r.getMessage()]
    assert f"dialect '{name}' ({name}-dialect 0.1.0) wants {route}" in said
    assert owner in said


async def test_paths_with_parameters_do_not_hide_ours(dist_dir: DistDir) -> None:
    _install(dist_dir.path, "aaa", DIALECT.replace('"POST /echo", ', '"POST /{any:path}", "GET /{any:path}", '))
    app = build_app(scripted("hello world", max_length=64), dialects=load_dialects(PluginHost()))
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        body = {"prompt": "a", "max_tokens": 5}
        assert (await client.post("/v1/completions", json=body)).json()["choices"][0]["text"] == "hello"
        assert "data" in (await client.get("/v1/models")).json()
        assert (await client.get("/health")).status_code == 200
        assert (await client.post("/else", content="Hi")).text == "scripted Hi: hello"


def test_a_mark_that_every_client_sends_is_refused(dist_dir: DistDir, caplog: pytest.LogCaptureFixture) -> None:
    _install(dist_dir.path, "aaa", DIALECT.replace("    stream_type", '    mark = "user-agent"\n    stream_type', 1))
    with caplog.at_level(logging.WARNING, "lmkit"):
        assert "Echo" not in [type(dialect).__name__ for dialect in load_dialects(PluginHost())]
    assert "dialect 'aaa' (aaa-dialect 0.1.0): its mark is 'user-agent'" in caplog.text


def test_the_doctor_reports_routes_that_are_taken(dist_dir: DistDir) -> None:
    _install(dist_dir.path, "aaa", DIALECT.replace('"POST /echo", ', '"POST /v1/chat/completions", "GET /health", '))
    _install(dist_dir.path, "bbb", DIALECT)
    ours = {e.name: e.module for e in PluginHost().entries("dialect") if e.official}
    write_dist(dist_dir.path, "lmkit-dialect-openai", {"dialect": {"openai": ours["openai"]}})
    found = [f for f in examine(dist_dir.host()) if f.code == "route-taken"]
    assert [(f.level, f.subject, f.message.partition(",")[0]) for f in found] == [
        ("error", "dialect:aaa", "wants POST /v1/chat/completions"),
        ("error", "dialect:aaa", "wants GET /health"),
        ("error", "dialect:bbb", "wants POST /echo/stream"),
    ]
    assert all("LMKIT_PLUGINS_DISABLE=" in f.fix for f in found)


RAISES = {
    "parse": DIALECT.replace("        return EchoExchange(", "        {raises}\n        return EchoExchange("),
    "whole": DIALECT.replace('        return f"{self', '        {raises}\n        return f"{self'),
    "chunk": DIALECT.replace("        return change", "        {raises}\n        return change"),
    "end": DIALECT.replace('        return b"."', "        {raises}"),
}


@pytest.mark.parametrize("error", ["OSError('/secret')", "SystemExit(3)", "KeyboardInterrupt"])
@pytest.mark.parametrize("method", RAISES)
async def test_one_that_raises_is_named(
    dist_dir: DistDir, caplog: pytest.LogCaptureFixture, method: str, error: str
) -> None:
    """B6: the client and the log hear who it was, and the server goes on."""
    name = f"{method}{len(error)}"
    _install(dist_dir.path, name, RAISES[method].replace("{raises}", f"raise {error}"))
    app = build_app(scripted("hello world", max_length=64), dialects=load_dialects(PluginHost()))
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        answer = await client.post("/echo/stream" if method in ("chunk", "end") else "/echo", content="Hi")
        body = {"prompt": "a", "max_tokens": 5}
        assert (await client.post("/v1/completions", json=body)).json()["choices"][0]["text"] == "hello"
    assert "no: plugin" in answer.text
    assert f"dialect '{name}' ({name}-dialect 0.1.0): {method} raised" in caplog.text
    assert "/secret" not in answer.text


async def test_one_whose_parse_gives_something_else_is_named(
    dist_dir: DistDir, caplog: pytest.LogCaptureFixture
) -> None:
    _install(
        dist_dir.path, "text", RAISES["parse"].replace("{raises}", "return 'text'").replace("def error(", "def no(")
    )
    app = build_app(scripted("hello world", max_length=64), dialects=load_dialects(PluginHost()))
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        answer = (await client.post("/echo", content="Hi")).json()["error"]
    assert answer["code"] == "plugin"
    assert "dialect 'text' (text-dialect 0.1.0): parse gave a str" in answer["message"]


@pytest.mark.parametrize(
    "wrong",
    ["1 / 0", "class Echo: routes = ('POST /echo',)", "def Echo(): return 1 / 0", DIALECT.replace("POST /", "/")],
)
def test_one_that_is_broken_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, wrong: str
) -> None:
    name = f"broken{len(wrong)}_dialect"
    files = {f"{name}.hooks": HOOKS.replace("echo_dialect", name), f"{name}.dialect": wrong}
    write_dist(tmp_path, "broken-dialect", {"dialect": {"echo": f"{name}.hooks"}}, files)
    monkeypatch.syspath_prepend(str(tmp_path))
    with caplog.at_level(logging.WARNING, "lmkit"):
        spoken = [type(dialect).__name__ for dialect in load_dialects(PluginHost())]
    assert {"OpenAI", "PoolingDialect"} <= set(spoken)
    assert "Echo" not in spoken
    assert "dialect 'echo'" in caplog.text


class Notes(Dialect):
    """Shows what came in; has the server's own path of models, for who sends its mark."""

    routes = ("POST /notes", "DELETE /notes/{id}/parts/{part}")
    light_routes = ("GET /notes/{id:path}", "POST /notes/count", "GET /v1/models")
    mark = "x-notes"

    def parse(self, incoming: Incoming, served: Served) -> Exchange | Answer:
        if incoming.route == "POST /notes":
            return NotesExchange(incoming.body.decode())
        if incoming.route == "POST /notes/count":
            return Count(incoming.body.decode())
        shown = [incoming.route, dict(incoming.path), dict(incoming.query), incoming.tenant != ""]
        shown += [incoming.headers.get("x-notes"), served.about["max_model_len"]]
        assert not {"authorization", "x-api-key"} & set(incoming.headers)
        return Answer(msgspec.json.encode(shown), 202, "text/json", {"x-left": "3"})

    def error(self, info: ErrorInfo) -> bytes:
        return f"no: {info.code}".encode()


class NotesExchange(Exchange):
    def __init__(self, prompt: str) -> None:
        super().__init__(TextAsk(prompts=[prompt], params=SamplingParams(max_tokens=5, temperature=0.0)))
        self.headers["x-name"] = "value"
        self.streamed = prompt == "streamed"

    def whole(self, turns: object) -> bytes:
        return b"whole"

    def chunk(self, turn: object, change: object) -> bytes:
        return b"chunk"


class Count(NotesExchange):
    played = False

    def whole(self, turns: list[Turn]) -> bytes:
        return b"%d" % len(turns[0].request.token_ids)


def notes(settings: ServerSettings | None = None) -> tuple[object, httpx.AsyncClient]:
    llm = scripted("hello", max_length=64)
    app = build_app(llm, settings, [*installed_dialects(), Notes()])
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    return app, httpx.AsyncClient(transport=transport, base_url="http://localhost")


async def test_routes_have_methods_and_parameters() -> None:
    settings = ServerSettings(api_keys=("one", "two"))
    async with notes(settings)[1] as client:
        headers = {"x-notes": "yes", "x-api-key": "one"}
        found = await client.get("/notes/a/b?x=1&y=2&x=3", headers=headers)
        shown = ["GET /notes/{id:path}", {"id": "a/b"}, {"x": "3", "y": "2"}, True, "yes", 64]
        assert (found.status_code, found.json(), found.headers["x-left"]) == (202, shown, "3")
        assert found.headers["content-type"] == "text/json; charset=utf-8"
        gone = await client.delete("/notes/a/parts/b", headers={"Authorization": "Bearer two"})
        assert gone.json()[:2] == ["DELETE /notes/{id}/parts/{part}", {"id": "a", "part": "b"}]
        assert "/notes/{id:path}" in (await client.get("/metrics", headers=headers)).text


async def test_answers_have_headers_and_turns_need_not_be_played() -> None:
    app, client = notes()
    for prompt, answer in (("Hi", "whole"), ("streamed", "chunk" * 5)):
        response = await client.post("/notes", content=prompt)
        assert (response.text, response.headers["x-name"]) == (answer, "value")
    counted = await client.post("/notes/count", content="four")
    assert (counted.text, counted.headers["x-name"]) == ("4", "value")
    assert len(app.state.backend.client.requests) == 2  # type: ignore[attr-defined]


async def test_a_mark_tells_whose_a_path_is() -> None:
    _, client = notes()
    async with client:
        assert (await client.get("/v1/models")).json()["object"] == "list"
        assert (await client.get("/v1/models", headers={"x-notes": "1"})).json()[0] == "GET /v1/models"
        assert (await client.get("/notes/x")).json()[0] == "GET /notes/{id:path}"


async def test_errors_are_written_as_who_asked_reads_them() -> None:
    _, client = notes(ServerSettings(api_keys=("one",)))
    mark, key = {"x-notes": "1"}, {"x-api-key": "one"}
    async with client:
        assert (await client.get("/notes/x")).text == "no: invalid_api_key"
        assert (await client.get("/nowhere", headers=mark)).text == "no: invalid_api_key"
        assert (await client.get("/nowhere", headers=mark | key)).text == "no: not-found"
        assert (await client.put("/notes", headers=key)).text == "no: method"
        assert (await client.post("/notes", content="x" * 100, headers=key)).text == "no: context_length_exceeded"
        assert (await client.get("/nowhere", headers=key)).json()["error"]["code"] == "not-found"
        assert (await client.get("/v1/models")).json()["error"]["code"] == "invalid_api_key"


async def test_light_routes_are_answered_when_the_engine_is_busy() -> None:
    app, client = notes()
    app.state.backend.draining = True  # type: ignore[attr-defined]
    async with client:
        assert (await client.post("/notes", content="Hi")).status_code == 503
        assert (await client.delete("/notes/a/parts/b")).text == "no: engine-busy"
        assert (await client.get("/notes/x")).status_code == 202
        assert (await client.post("/notes/count", content="four")).text == "4"


class Errands(Dialect):
    """Hands one route on, and keeps what it had done in the background."""

    routes = ("POST /errands",)
    light_routes = ("GET /errands",)

    def __init__(self) -> None:
        self.asked: asyncio.Queue[Incoming] = asyncio.Queue()
        self.told: list[Answer] = []
        self.stopped = False

    def parse(self, incoming: Incoming, served: Served) -> Answer | Incoming:
        if incoming.route == "GET /errands":
            return Answer(Path(__file__), media_type="text/plain")
        return replace(incoming, route="POST /v1/completions")

    async def work(self, answer: Callable[[Incoming], Awaitable[Answer]]) -> None:
        try:
            while True:
                self.told.append(await answer(await self.asked.get()))
        finally:
            self.stopped = True


async def errand(errands: Errands, route: str = "POST /v1/completions", **body: object) -> Answer:
    num = len(errands.told)
    errands.asked.put_nowait(Incoming(route, msgspec.json.encode({"prompt": "a", "max_tokens": 5, **body})))
    while len(errands.told) == num:
        await asyncio.sleep(0.005)
    return errands.told[-1]


async def test_a_request_for_another_dialect_is_answered_as_its_own() -> None:
    async with (
        listening(scripted("hello"), dialects=[*installed_dialects(), Errands()]) as url,
        httpx.AsyncClient() as client,
    ):
        body = {"prompt": "a", "max_tokens": 5}
        assert (await client.post(f"{url}/errands", json=body)).json()["choices"][0]["text"] == "hello"
        streamed = await client.post(f"{url}/errands", json=body | {"stream": True})
        assert streamed.text.endswith("data: [DONE]\n\n")
        assert (await client.post(f"{url}/errands", json={})).json()["error"]["param"] == "prompt"
        part = await client.get(f"{url}/errands", headers={"Range": "bytes=3-9"})
        assert (part.status_code, part.text) == (206, Path(__file__).read_text()[3:10])


async def test_work_in_the_background_is_answered_behind_all_others() -> None:
    errands, llm = Errands(), scripted("hello")
    dialects = [*installed_dialects(), errands]
    apps: list[Any] = []
    async with listening(llm, on_app=apps.append, dialects=dialects):
        done = await errand(errands)
        assert (done.status, json.loads(done.body)["choices"][0]["text"]) == (200, "hello")
        assert llm.client.requests[-1].priority == LAST  # type: ignore[attr-defined]
        assert llm.client.requests[-1].cache_salt is None  # type: ignore[attr-defined]
        for route, body, status, code in (
            ("POST /v1/completions", {"prompt": 1}, 400, "invalid-param"),
            ("POST /v1/completions", {"stream": True}, 400, "unsupported"),
            ("POST /v1/completions", {"priority": -1}, 403, "priority"),
            ("POST /v1/nowhere", {}, 404, "not-found"),
        ):
            refused = await errand(errands, route, **body)
            assert (refused.status, json.loads(refused.body)["error"]["code"]) == (status, code)
        backend = apps[0].state.backend
        backend.running.update(range(1000))  # nobody is refused for want of room, but waits
        waiting = asyncio.ensure_future(errand(errands))
        await asyncio.sleep(0.1)
        assert not waiting.done()
        backend.running.clear()
        assert (await waiting).status == 200
    assert errands.stopped


async def test_what_an_engine_died_with_is_tried_again() -> None:
    errands, llm = Errands(), scripted("a long answer " * 20, delay=0.005)
    async with listening(llm, dialects=[*installed_dialects(), errands]):
        for deaths, status in ((2, 200), (3, 503)):
            waiting = asyncio.ensure_future(errand(errands, max_tokens=50))
            for _ in range(deaths):
                num = len(llm.client.requests)  # type: ignore[attr-defined]
                while not llm.client.num_streams or len(llm.client.requests) == num - 1:  # type: ignore[attr-defined]
                    await asyncio.sleep(0.001)
                llm.client.fail_next(EngineDead("it died").info())  # type: ignore[attr-defined]
            assert (await waiting).status == status


WITH_OPTIONS = """
from dataclasses import dataclass

from lmkit_http.dialect import Dialect


@dataclass
class Options:
    size: int = 1


class Sized(Dialect):
    routes = ("POST /sized",)

    def __init__(self, size):
        self.size = size

    def parse(self, incoming, served): ...
"""


def test_options_of_a_dialect(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hooks = HOOKS.replace(
        'target="echo_dialect.dialect:Echo"', 'target="sized.made:Sized", options="sized.made:Options"'
    )
    files = {"sized.hooks": hooks, "sized.made": WITH_OPTIONS}
    write_dist(tmp_path, "sized-dialect", {"dialect": {"echo": "sized.hooks"}}, files)
    monkeypatch.syspath_prepend(str(tmp_path))
    found = load_dialects(PluginHost(), {"dialect.echo": {"size": "3"}})
    assert [dialect.size for dialect in found if type(dialect).__name__ == "Sized"] == [3]  # type: ignore[attr-defined]
    with pytest.raises(UnknownKey, match="siz"):
        load_dialects(PluginHost(), {"dialect.echo": {"siz": "3"}})

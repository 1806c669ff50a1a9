"""A dialect of somebody else's: a dist outside of the repository is served without a word about it anywhere."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from lmkit.api import PluginError
from lmkit.plugins.host import PluginHost
from lmkit_http.app import build_app
from lmkit_http.dialects import load_dialects
from lmkit_testing.dists import write_dist
from lmkit_testing.serving import scripted

HOOKS = """
from lmkit.api import DialectSpec, hookimpl


@hookimpl
def lmkit_dialects():
    yield DialectSpec(name="echo", summary="Plain text", target="echo_dialect.dialect:Echo")
"""

DIALECT = """
from lmkit.api import SamplingParams
from lmkit.front.dialect import Dialect, Exchange, TextAsk


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
    routes = ("/echo", "/echo/stream")
    stream_type = "text/plain; charset=utf-8"

    def parse(self, route, body, served):
        return EchoExchange(body.decode(), route.endswith("stream"), served.names)

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
    with pytest.raises(PluginError, match="both answer /echo"):
        load_dialects(PluginHost())


@pytest.mark.parametrize("wrong", ["1 / 0", "class Echo: routes = ('/echo',)", "def Echo(): return 1 / 0"])
def test_one_that_is_broken_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, wrong: str
) -> None:
    name = f"broken{len(wrong)}_dialect"
    files = {f"{name}.hooks": HOOKS.replace("echo_dialect", name), f"{name}.dialect": wrong}
    write_dist(tmp_path, "broken-dialect", {"dialect": {"echo": f"{name}.hooks"}}, files)
    monkeypatch.syspath_prepend(str(tmp_path))
    with caplog.at_level(logging.WARNING, "lmkit"):
        spoken = [type(dialect).__name__ for dialect in load_dialects(PluginHost())]
    assert spoken == ["OpenAI", "PoolingDialect"]
    assert "dialect 'echo'" in caplog.text

"""`lmkit serve --role`, `lmkit split`: real processes, which are killed."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace

import httpx
import pytest
from lmkit import LLM
from lmkit.api import ConfigError
from lmkit_cli.settings import gather
from lmkit_http.roles import with_role

from tests.e2e.conftest import Server, serving

WAIT = 120.0  # seconds for what a busy machine may take
PROMPT = "The quick brown fox jumps over the lazy dog. " * 12
BODY = {"model": "demo", "prompt": PROMPT, "max_tokens": 24, "temperature": 0, "ignore_eos": True}
NUM_KILLS = int(os.environ.get("KV_KILLS", "1"))


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


@contextmanager
def front(*args: str) -> Iterator[str]:
    """`lmkit split`; its URL."""
    port = free_port()
    process = subprocess.Popen(
        [sys.executable, "-m", "lmkit", "split", *args, "--port", str(port), "--min-bytes", "64"]
    )
    url, until = f"http://127.0.0.1:{port}", time.monotonic() + WAIT
    try:
        while True:
            try:
                httpx.get(url, timeout=WAIT)
                break
            except httpx.TransportError:
                assert process.poll() is None
                assert time.monotonic() < until
                time.sleep(0.05)
        yield url
    finally:
        process.kill()
        process.wait()


def answer(url: str, **more: object) -> tuple[str, int]:
    """Text, and how many tokens of the prompt were not computed by who answered."""
    reply = httpx.post(f"{url}/v1/completions", json={**BODY, **more}, timeout=WAIT)
    assert reply.status_code == 200, reply.text
    found = reply.json()
    return found["choices"][0]["text"], found["usage"]["prompt_tokens_details"]["cached_tokens"]


def stream(url: str) -> str:
    text = ""
    with httpx.stream("POST", f"{url}/v1/completions", json={**BODY, "stream": True}, timeout=WAIT) as reply:
        for line in reply.iter_lines():
            if line.startswith("data: {"):
                text += json.loads(line[6:])["choices"][0]["text"]
    return text


def kill(server: Server) -> None:
    """The server and its engine, at once."""
    for pid in (*server.children(), server.process.pid):
        os.kill(pid, signal.SIGKILL)
    server.wait()


@pytest.mark.slow
def test_a_prompt_from_one_engine_and_the_answer_from_another() -> None:
    """Under load, then with one server killed after the other: every answer is right."""
    common = ("--threads", "1", "--num-blocks", "200")
    for round_ in range(NUM_KILLS):
        peer = f"127.0.0.1:{free_port()}"
        with (
            serving(*common, "--role", "prefill", "--peers", peer) as prefill,
            serving(*common, "--role", "decode", "--peers", peer, "--kv-connector.tcp.seconds", "20") as decode,
        ):
            urls = prefill.url(WAIT), decode.url(WAIT)
            with front("--prefill", urls[0], "--decode", urls[1]) as url:
                want, cached = answer(url)
                assert cached > 100, "the decode server has not got the prompt from the other one"
                assert stream(url) == want
                prompts = [f"{round_} {i} {PROMPT}" for i in range(6)]
                expected = [answer(urls[0], prompt=prompt)[0] for prompt in prompts]
                with ThreadPoolExecutor(6) as pool:
                    asked = [pool.submit(answer, url, prompt=prompt) for prompt in prompts]
                    kill(prefill)
                    assert [one.result()[0] for one in asked] == expected
                assert answer(url, prompt="again " + PROMPT)[0] == answer(urls[1], prompt="again " + PROMPT)[0]
        with (
            serving(*common, "--role", "prefill", "--peers", peer) as prefill,
            serving(*common, "--role", "decode", "--peers", peer) as decode,
        ):
            urls = prefill.url(WAIT), decode.url(WAIT)
            with front("--prefill", urls[0], "--decode", urls[1]) as url:
                kill(decode)
                assert answer(url)[0] == want


@pytest.mark.parametrize(
    ("wanted", "role", "peers", "words"),
    [
        ({}, "prefill", "", "go together"),
        ({}, None, "127.0.0.1:1", "go together"),
    ],
)
def test_refused(wanted: dict[str, str], role: str | None, peers: str, words: str) -> None:
    settings = gather({})
    settings = replace(settings, config=replace(settings.config, wanted=wanted))
    with pytest.raises(ConfigError, match=words):
        with_role(settings, role, peers)


@pytest.mark.parametrize(("wanted", "name"), [({}, "tcp"), ({"kv_connector": "nixl"}, "nixl")])
def test_a_role_is_a_connector_with_an_address(wanted: dict[str, str], name: str) -> None:
    settings = gather({})
    settings = replace(settings, config=replace(settings.config, wanted=wanted))
    for role, option in (("prefill", "listen"), ("decode", "peers")):
        found = with_role(settings, role, "127.0.0.1:1")
        assert found.config.wants("kv_connector") == name
        assert found.config.plugins[f"kv_connector.{name}"] == {option: "127.0.0.1:1"}
        rows = {row.key: row.source for row in found.settings()}
        assert rows[f"plugins.kv_connector.{name}.{option}"] == f"command line --role {role}"


def test_a_connector_without_peers_has_no_role() -> None:
    settings = gather({})
    settings = replace(settings, config=replace(settings.config, wanted={"kv_connector": "offload"}))
    with pytest.raises(ConfigError, match=r"kv_connector\.offload.*peers|peers.*kv_connector\.offload"):
        LLM(config=with_role(settings, "decode", "127.0.0.1:1").config)

"""KV events as a router of the field reads them: vllm-router credits what the engine's cache has, and catches up."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tests.e2e.conftest import serving
from tests.kv.test_roles import WAIT, free_port

ROUTER = os.environ.get("VLLM_ROUTER") or shutil.which("vllm-router", path=Path(sys.executable).parent)
pytestmark = pytest.mark.skipif(ROUTER is None, reason="vllm-router is not installed (nox -s kv installs it)")
BLOCK = 16  # tokens; what the router takes blocks to be
DECISION = re.compile(r"input_tokens=(\d+) new_prefill_tokens=\d+ credited_prefix_tokens=(\d+)")


def written(log: Path) -> str:
    """The log without the sequences that colour it."""
    return re.sub(r"\x1b\[[0-9;]*m", "", log.read_text())


@contextmanager
def router(worker: str, events: str, replay: str, log: Path) -> Iterator[str]:
    """vllm-router in front of `worker`; its URL. `log`: where it writes its decisions."""
    port, metrics = free_port(), free_port()
    sources = ["--kv-event-source", f"{worker}={events}", "--kv-event-replay-source", f"{worker}={replay}"]
    shape = ["--kv-event-block-size", str(BLOCK), "--kv-event-model", "demo", "--policy", "kv_aware"]
    where = ["--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(metrics), "--log-level", "debug"]
    with log.open("wb") as file:
        process = subprocess.Popen(
            [str(ROUTER), "--worker-urls", worker, *sources, *shape, *where], stdout=file, stderr=subprocess.STDOUT
        )
    try:
        until = time.monotonic() + WAIT
        while "spawned subscriber" not in written(log) or "Starting server" not in written(log):
            assert process.poll() is None, written(log)
            assert time.monotonic() < until
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


def credited(url: str, prompt: str, log: Path) -> tuple[int, int, int]:
    """Tokens of the prompt, tokens that the router credits, tokens that the engine found in its cache."""
    num_before = len(DECISION.findall(written(log)))
    body = {"model": "demo", "prompt": prompt, "max_tokens": 1}
    usage = httpx.post(f"{url}/v1/completions", json=body, timeout=WAIT).raise_for_status().json()["usage"]
    decisions = DECISION.findall(written(log))[num_before:]
    assert len(decisions) == 1
    (num_tokens, num_credited), num_hits = decisions[0], usage["prompt_tokens_details"]["cached_tokens"]
    assert int(num_tokens) == usage["prompt_tokens"]
    return int(num_tokens), int(num_credited), num_hits


def test_a_router_credits_what_the_cache_has(tmp_path: Path) -> None:
    """The second time every cached token is credited; after its restart the router learns of the past by the replay
    socket as soon as a new event shows it the gap."""
    prompts = [f"{start} " + " ".join(f"Add {i} and {i + 1}." for i in range(60)) for start in ("A", "B", "C")]
    events, replay = (f"tcp://127.0.0.1:{free_port()}" for _ in range(2))
    options = [f"--kv-connector.events.{name}={value}" for name, value in (("address", events), ("replay", replay))]
    with serving("demo", "--kv-connector", "events", *options, "--block-size", str(BLOCK)) as server:
        worker, log = server.url(WAIT), tmp_path / "first.log"
        with router(worker, events, replay, log) as url:
            for prompt in prompts[:2]:
                assert credited(url, prompt, log)[1] < BLOCK
            until = time.monotonic() + WAIT
            while written(log).count("live sequence advanced") < 2:  # events take their time, too
                assert time.monotonic() < until
                time.sleep(0.05)
            time.sleep(0.5)
            for prompt in prompts[:2]:
                num_tokens, num_credited, num_hits = credited(url, prompt, log)
                assert num_credited == num_hits == (num_tokens - 1) // BLOCK * BLOCK
        log = tmp_path / "second.log"
        with router(worker, events, replay, log) as url:
            assert credited(url, prompts[0], log)[1] == 0
            credited(url, prompts[2], log)  # new blocks, and so an event with a number that shows the gap
            until = time.monotonic() + WAIT
            while "replay sequence advanced" not in written(log):
                assert time.monotonic() < until
                time.sleep(0.05)
            time.sleep(0.5)
            _, num_credited, num_hits = credited(url, prompts[1], log)
            assert num_credited == num_hits > 0

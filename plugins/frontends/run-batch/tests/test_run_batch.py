"""`lmkit run-batch` with the demo: each request has one line, also after a kill; and what is refused."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from lmkit.api import EngineDead
from lmkit_run_batch.play import while_alive

COMMAND = [sys.executable, "-m", "lmkit", "run-batch", "--model", "demo", "--threads", "1", "--kv-memory", "8MiB"]


def request(id: str, url: str = "/v1/completions", **body: Any) -> dict[str, Any]:
    return {"custom_id": id, "method": "POST", "url": url, "body": body}


def write(path: Path, *requests: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(one) + "\n" for one in requests))
    return path


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *map(str, arguments)], capture_output=True, text=True, timeout=300)


@pytest.mark.full("lmkit-run-batch", "lmkit-dialect-batches", "lmkit-http")
def test_one_line_for_each_request_whatever_ends_the_run(tmp_path: Path) -> None:
    asked = [request(f"p{i}", prompt=f"{i} + 1 =", max_tokens=24, temperature=0, ignore_eos=True) for i in range(60)]
    asked.append(request("chat", "/v1/chat/completions", messages=[{"role": "user", "content": "Hi"}], max_tokens=4))
    asked.append(request("wrong", prompt="x", temperature=-1))
    asked.append(request("lost", "/v1/nowhere", prompt="x"))
    source, output = write(tmp_path / "in.jsonl", *asked), tmp_path / "out.jsonl"
    with subprocess.Popen([*COMMAND, "-i", source, "-o", output], stderr=subprocess.PIPE) as running:
        while not output.exists() or output.read_bytes().count(b"\n") < 5:
            assert running.poll() is None
        running.send_signal(signal.SIGKILL)
        running.communicate()
    before = output.read_bytes()
    before = before[: before.rfind(b"\n") + 1]
    refused = run("-i", source, "-o", output)
    assert refused.returncode == 2
    assert "--resume" in refused.stderr
    done = run("-i", source, "-o", output, "--resume")
    assert done.returncode == 0, done.stderr
    assert "61 answered, 2 failed, of 63" in done.stderr
    assert output.read_bytes().startswith(before)
    found = [json.loads(line) for line in output.read_text().splitlines()]
    assert sorted(one["custom_id"] for one in found) == sorted(one["custom_id"] for one in asked)
    by_id = {one["custom_id"]: one["response"] for one in found}
    assert by_id["chat"]["body"]["object"] == "chat.completion"
    assert (by_id["wrong"]["status_code"], by_id["lost"]["status_code"]) == (400, 404)
    assert {by_id[f"p{i}"]["body"]["usage"]["completion_tokens"] for i in range(60)} == {24}
    again = run("-i", source, "-o", output, "--resume")  # nothing is left: no engine is started
    assert (again.returncode, len(output.read_text().splitlines())) == (0, 63)


@pytest.mark.parametrize(
    ("content", "output", "words"),
    [
        ("", "", "has no requests"),
        ('{"custom_id": "a"}\n', "", "line 1: not a request"),
        (json.dumps(request("a", prompt="x")) + "\n", "precious\n", "has something in it"),
    ],
)
def test_what_is_wrong_is_said_before_anything_runs(tmp_path: Path, content: str, output: str, words: str) -> None:
    (tmp_path / "in").write_text(content)
    (tmp_path / "out").write_text(output)
    refused = run("-i", tmp_path / "in", "-o", tmp_path / "out")
    assert refused.returncode == 2
    assert words in " ".join(refused.stderr.split())
    assert (tmp_path / "out").read_text() == output


async def test_without_an_engine_it_ends() -> None:
    class Gone:
        ended, failure = False, None

    client = Gone()
    waiting = asyncio.ensure_future(while_alive(client, asyncio.sleep(600)))  # type: ignore[arg-type]
    await asyncio.sleep(0)
    client.ended = True
    with pytest.raises(EngineDead) as dead:
        await waiting
    assert "--resume" in dead.value.fix
    client.ended = False
    await while_alive(client, asyncio.sleep(0))  # type: ignore[arg-type]

"""`lmkit serve` as a process, on a tiny random checkpoint: start, faults, shutdown."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import perf_counter, sleep

import httpx
import lmkit_cli
import pytest
from lmkit import LLM
from lmkit.api import CheckpointError

from .conftest import Server, lmkit, post, serving

BUSY = 10.0  # seconds; the target is two on an idle machine: a loaded one must not fail for that


def test_first_screen_says_what_why_and_how(tiny_server: Server) -> None:
    url = tiny_server.url()
    screen = tiny_server.output
    for word in (
        "LlamaForCausalLM",
        "cpu",
        "attention",
        "torch",
        "KV cache",
        "weights",
        f"curl {url}/v1/chat/completions",
    ):
        assert word in screen
    assert "ready in" in screen


def test_start_up_phases_sum_to_the_wall_time(tiny_server: Server) -> None:
    tiny_server.url()
    text = tiny_server.output.replace("\n", " ")
    line = text[text.index("ready in") :].partition(")")[0]
    total = float(line.split()[2])
    phases = [float(part.split()[-1]) for part in line.partition("(")[2].split(",")]
    assert sum(phases) == pytest.approx(total, abs=0.05)
    assert tiny_server.ready_after == pytest.approx(total, abs=0.3, rel=0.05)


def test_the_curl_line_works(tiny_server: Server) -> None:
    import shlex
    import subprocess

    tiny_server.url()
    line = next(line for line in tiny_server.lines if line.startswith("curl "))
    done = subprocess.run([*shlex.split(line), "-s"], capture_output=True, text=True, timeout=60, check=True)
    assert json.loads(done.stdout)["choices"][0]["message"]["role"] == "assistant"


def test_only_the_http_port_listens(tiny_server: Server) -> None:
    port = int(tiny_server.url().rpartition(":")[2])
    inodes = {}
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A":
                inodes[fields[9]] = int(fields[1].rpartition(":")[2], 16)
    pids = [tiny_server.process.pid, *tiny_server.children()]
    assert len(pids) == 3  # of the engine, and of templates and tokenizers
    links = [os.readlink(fd) for pid in pids for fd in Path(f"/proc/{pid}/fd").iterdir() if fd.is_symlink()]
    ports = [inodes[link[8:-1]] for link in links if link.startswith("socket:[") and link[8:-1] in inodes]
    assert set(ports) == {port}  # of several listeners on one socket


def test_sixteen_streams_at_once(tiny_server: Server) -> None:
    url = tiny_server.url()

    def one(i: int) -> str:
        body = {"model": "model", "prompt": f"p{i % 4}", "max_tokens": 20, "temperature": 0, "stream": True}
        text = ""
        with httpx.stream("POST", url + "/v1/completions", json=body, timeout=60) as response:
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    text += json.loads(line[6:])["choices"][0]["text"]
        return text

    with ThreadPoolExecutor(16) as pool:
        texts = list(pool.map(one, range(16)))
    assert all(texts[i] == texts[i % 4] for i in range(16))


def test_killed_engine_ends_streams_and_readiness(tiny_server: Server) -> None:
    server, url = tiny_server, tiny_server.url()
    body = {"model": "model", "prompt": "hello", "max_tokens": 240, "stream": True, "ignore_eos": True}
    body["resume"] = False
    with ThreadPoolExecutor(8) as pool:
        started = []

        def stream(i: int) -> tuple[str, float]:
            lines = []
            with httpx.stream("POST", url + "/v1/completions", json={**body, "seed": i}, timeout=60) as response:
                for line in response.iter_lines():
                    lines.append(line)
                    if len(lines) == 2:
                        started.append(i)
            return "\n".join(lines), perf_counter()

        jobs = [pool.submit(stream, i) for i in range(8)]
        while len(started) < 8 and not any(job.done() for job in jobs):
            sleep(0.001)
        (pid,) = server.engine_pids()
        os.kill(pid, signal.SIGKILL)
        killed = perf_counter()
        while httpx.get(url + "/ready").status_code == 200:
            assert perf_counter() - killed < BUSY
        for job in jobs:
            text, ended = job.result(timeout=BUSY)
            assert ended - killed < BUSY
            assert "engine-dead" in text or "[DONE]" in text
        assert any("engine-dead" in job.result()[0] for job in jobs)
    assert httpx.get(url + "/live").status_code == 200
    refused = post(url, "/v1/completions", model="model", prompt="a")
    assert refused.status_code == 503
    while httpx.get(url + "/ready").status_code != 200:  # a new engine takes over
        assert perf_counter() - killed < 60.0
        sleep(0.05)
    assert post(url, "/v1/completions", model="model", prompt="a", max_tokens=3).status_code == 200
    assert server.engine_pids() != [pid]


@pytest.mark.full("lmkit-cli", "lmkit-http")
def test_sigterm_lets_running_requests_finish(tiny: Path) -> None:
    with serving(str(tiny)) as server:
        url = server.url()
        body = {"model": "model", "prompt": "hello", "max_tokens": 200, "ignore_eos": True, "stream": True}
        body["stream_options"] = {"include_usage": True}
        with httpx.stream("POST", url + "/v1/completions", json=body, timeout=60) as response:
            lines = response.iter_lines()
            next(lines)
            server.process.send_signal(signal.SIGTERM)
            rest = [line for line in lines if line.startswith("data: {")]
        assert json.loads(rest[-1][6:])["usage"]["completion_tokens"] == 200
        assert server.wait() == 0
        assert server.engine_pids() == []


def _alive(pid: int) -> bool:
    """Not gone, and no zombie that nobody has waited for yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_stopped_while_it_starts(tiny: Path, tmp_path: Path, number: signal.Signals, status: int) -> None:
    with serving(str(tiny), TMPDIR=str(tmp_path)) as server:
        while not server.engine_pids():
            sleep(0.005)
        (pid,) = server.engine_pids()
        server.process.send_signal(number)
        # an interrupt that was handled, but met Python's `exec` (dataclasses use it), ends the process by that signal:
        # to a shell it is the same
        assert server.wait(30) in ({status, -number} if number == signal.SIGINT else {status})
        assert "Traceback" not in server.output
        assert not _alive(pid)
        assert list(tmp_path.iterdir()) == []


BESIDE = pytest.mark.full("lmkit-cli", "lmkit-http")  # another of this file says nearly the same


@pytest.mark.parametrize("seconds", [0.3, *(pytest.param(s, marks=BESIDE) for s in (0.0, 1.0))])
def test_killed_while_it_starts(tiny: Path, seconds: float) -> None:
    """The engine process ends by itself, whatever it was doing."""
    with serving(str(tiny)) as server:
        while not server.engine_pids():
            sleep(0.005)
        (pid,) = server.engine_pids()
        sleep(seconds)
        server.process.kill()
        server.wait()  # until nobody writes to its output
        assert not _alive(pid)


@BESIDE
def test_engine_killed_before_it_listens(tiny: Path) -> None:
    """The first engine is not replaced: whoever started the server sees why it did not start."""
    with serving(str(tiny)) as server:
        while not server.engine_pids():
            sleep(0.005)
        os.kill(server.engine_pids()[0], signal.SIGKILL)
        assert server.wait() == 6
        assert "killed by signal SIGKILL" in server.output
        assert "Traceback" not in server.output


@pytest.mark.parametrize(
    "arguments",
    [
        # pinned: a name that nobody has is refused
        ("demo", "--attention", "nobody"),
        *(pytest.param(a, marks=BESIDE) for a in (("demmo",), ("demo", "--port", "1000000"))),
    ],
)
def test_refused_start_leaves_no_process(arguments: tuple[str, ...], tmp_path: Path) -> None:
    done = lmkit("serve", *arguments, MARK=str(tmp_path))
    assert done.returncode != 0
    assert "error:" in done.stderr
    assert "Traceback" not in done.stderr
    assert not [pid for pid in Path("/proc").glob("[0-9]*") if _is_marked(pid, str(tmp_path))]


def _is_marked(process: Path, mark: str) -> bool:
    try:
        return f"MARK={mark}".encode() in (process / "environ").read_bytes()
    except OSError:
        return False


def serve(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    """`lmkit serve` in this process, where it is refused: status and what it said of that."""
    status = lmkit_cli.run(("serve", *arguments))
    said = capsys.readouterr().err
    assert "Traceback" not in said
    return status, said


def test_port_in_use(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        status, said = serve(capsys, str(tiny), "--port", str(port))
    assert status == 2
    assert str(port) in said
    assert "port-in-use" in said


def test_public_address_needs_a_key(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, said = serve(capsys, str(tiny), "--host", "0.0.0.0", "--port", "0")
    assert status == 2
    assert "--api-key" in said


def test_unknown_model_name(capsys: pytest.CaptureFixture[str]) -> None:
    status, said = serve(capsys, "demmo")
    assert status == 4
    assert "demmo" in said
    assert "code: checkpoint" in said


def test_unknown_plugin_option(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, said = serve(capsys, str(tiny), "--attention.torch.nonsense", "1")
    assert status == 2
    assert "nonsense" in said


def corrupt(tiny: Path, path: Path, name: str) -> Path:
    """A copy of the checkpoint with one kind of damage."""
    shutil.copytree(tiny, path)
    weights = path / "model.safetensors"
    config = json.loads((path / "config.json").read_text())
    match name:
        case "truncated":
            weights.write_bytes(weights.read_bytes()[:-1000])
        case "header":
            weights.write_bytes(b"\xff" * 8 + weights.read_bytes()[8:])
        case "shape":
            config["intermediate_size"] = 96
        case "layers":
            config["num_hidden_layers"] = 3
        case "activation":
            config["hidden_act"] = "softplus"
        case "json":
            (path / "config.json").write_text("{")
            return path
    (path / "config.json").write_text(json.dumps(config))
    return path


DAMAGES = {
    "truncated": "model.safetensors",
    "header": "model.safetensors",
    "shape": "",
    "layers": "layers.2",
    "activation": "hidden_act",
    "json": "config.json",
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damaged_checkpoint_is_a_typed_error(tiny: Path, tmp_path: Path, name: str) -> None:
    path = corrupt(tiny, tmp_path / "model", name)
    with pytest.raises(CheckpointError) as caught:
        LLM(str(path))
    assert DAMAGES[name] in str(caught.value)


@pytest.mark.full("lmkit-cli", "lmkit-http")
def test_damaged_weights_are_one_screen(tiny: Path, tmp_path: Path) -> None:
    """The engine process finds it."""
    done = lmkit("serve", str(corrupt(tiny, tmp_path / "model", "truncated")), "--port", "0")
    assert done.returncode == 4, done.stderr
    assert "error:" in done.stderr
    assert "Traceback" not in done.stderr


def test_damaged_config_is_one_screen(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The server's own process finds it."""
    status, said = serve(capsys, str(corrupt(tiny, tmp_path / "model", "activation")), "--port", "0")
    assert status == 4
    assert "error:" in said


@BESIDE
def test_no_memory(tiny: Path) -> None:
    done = lmkit("serve", str(tiny), "--port", "0", "--num-blocks", "100000000")
    assert done.returncode == 5, done.stderr
    assert "no-memory" in done.stderr

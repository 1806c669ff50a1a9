"""Servers in subprocesses, and small checkpoints to serve."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from time import perf_counter, sleep

import httpx
import pytest
from lmkit_testing.checkpoints import byte_tokenizer, tiny_checkpoint

VOCAB = 259  # bytes and three special tokens


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama that speaks bytes."""
    path = tiny_checkpoint("llama", tmp_path_factory.mktemp("tiny") / "model", vocab_size=VOCAB)
    assert byte_tokenizer(path) == VOCAB
    return path


class Server:
    """A running `lmkit` process: its output so far, its address once it is ready."""

    def __init__(self, args: tuple[str, ...], env: dict[str, str]) -> None:
        self.began = perf_counter()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "lmkit", *args],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "COLUMNS": "160", **env},
        )
        self.lines: list[str] = []
        self.ready_after = 0.0  # seconds
        self._reader = Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("ready in"):
                self.ready_after = perf_counter() - self.began
            self.lines.append(line)

    @property
    def output(self) -> str:
        return "".join(self.lines)

    def url(self, timeout: float = 60.0) -> str:
        """Waits until the server is ready."""
        deadline = perf_counter() + timeout
        while perf_counter() < deadline:
            found = re.search(r"curl (http://\S+)/v1", self.output)  # the last line of the first screen
            if found:
                return found[1]
            assert self.process.poll() is None, self.output
            sleep(0.02)
        raise AssertionError(f"not ready in {timeout} s:\n{self.output}")

    def engine_pids(self) -> list[int]:
        """Engine processes of this server."""
        return self.children(but="lmkit_tokenizer_json.process")

    def children(self, but: str = "-") -> list[int]:
        """Processes that it started; not those that run the module `but`."""
        found = []
        for stat in Path("/proc").glob("[0-9]*/stat"):
            try:
                fields = stat.read_text().rpartition(")")[2].split()
                command = stat.with_name("cmdline").read_bytes()
            except OSError:
                continue
            if int(fields[1]) == self.process.pid and fields[0] != "Z" and but.encode() not in command.split(b"\0"):
                found.append(int(stat.parent.name))
        return found

    def wait(self, timeout: float = 30.0) -> int:
        status = self.process.wait(timeout)
        self._reader.join(timeout)
        assert self.process.stdout is not None
        self.process.stdout.close()
        return status

    def stop(self) -> int:
        """SIGTERM; the exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.wait()


@contextmanager
def serving(*args: str, **env: str) -> Iterator[Server]:
    """`lmkit serve ARGS` on a free port; stopped at the end."""
    server = Server(("serve", "--port", "0", *args), env)
    try:
        yield server
    finally:
        if server.process.poll() is None:
            server.process.kill()
            server.wait()


@pytest.fixture(scope="module")
def tiny_server(tiny: Path) -> Iterator[Server]:
    with serving(str(tiny)) as server:
        server.url()
        yield server
        assert server.stop() == 0, server.output


def post(url: str, path: str, **body: object) -> httpx.Response:
    return httpx.post(url + path, json=body, timeout=60)


def lmkit(*args: str, stdin: str | None = None, **env: str) -> subprocess.CompletedProcess[str]:
    """One command of the command line, to its end."""
    return subprocess.run(
        [sys.executable, "-m", "lmkit", *args],
        input=stdin,
        capture_output=True,
        text=True,
        env={**os.environ, "COLUMNS": "160", **env},
        timeout=120,
        check=False,
    )

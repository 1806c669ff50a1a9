"""What a newcomer does: `lmkit plugins new`, install, and the lines of the README that it wrote, up to an answer."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import zipfile
from contextlib import chdir
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import pytest
from flit_core import buildapi
from lmkit_cli.scaffold import entry_name, kinds

DOCS = Path(__file__).parents[2] / "docs"
SECONDS = 120.0  # until a server is ready: no measure of speed
pytestmark = pytest.mark.slow


class Shell:
    """A newcomer's: an environment with the plugin, in an empty folder."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.site = folder, folder / "site"
        path = os.pathsep.join([str(self.site), *(p for p in sys.path if p)])
        bin = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        self.environment = {**os.environ, "PYTHONPATH": path, "PATH": bin}

    def run(self, command: str) -> str:
        done = subprocess.run(
            ["bash", "-ec", command], cwd=self.folder, env=self.environment, capture_output=True, text=True,
            check=False, timeout=SECONDS,
        )  # fmt: skip
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
        return done.stdout

    def install(self, folder: Path) -> None:
        """What pip does with a dist of pure Python, without the network."""
        with chdir(folder):
            name = buildapi.build_wheel(str(self.folder))
        with zipfile.ZipFile(self.folder / name) as wheel:
            wheel.extractall(self.site)

    def served(self, command: str, ask: str) -> str:
        """What the last line of `command`, a server, answers to `ask`; both name port 8000."""
        with socket.create_server(("localhost", 0)) as free:
            port = free.getsockname()[1]
        *before, serve = command.splitlines()
        lines = "\n".join([*before, f"exec env {serve} --port {port}"])
        log = self.folder / "server.log"
        with log.open("w") as out:
            process = subprocess.Popen(
                ["bash", "-ec", lines], cwd=self.folder, env=self.environment, stdout=out, stderr=out
            )
        try:
            self._wait(process, port, log)
            return self.run(ask.replace("localhost:8000", f"localhost:{port}"))
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    @staticmethod
    def _wait(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
        until = time.monotonic() + SECONDS
        while True:
            try:
                urlopen(f"http://localhost:{port}/health").close()
                return
            except (URLError, ConnectionError):
                assert process.poll() is None, log.read_text()
                assert time.monotonic() < until, f"not ready after {SECONDS:g} s\n{log.read_text()}"
                time.sleep(0.2)


def blocks(readme: str) -> list[str]:
    """What is to be typed: the indented blocks."""
    found = re.findall(r"(?:^    .+\n)+", readme, re.MULTILINE)
    return ["\n".join(line[4:] for line in block.splitlines()) for block in found]


@pytest.mark.parametrize("kind", kinds())
def test_from_new_to_an_answer(kind: str, tmp_path: Path) -> None:
    shell = Shell(tmp_path)
    assert "next: pip install" in shell.run(f"lmkit plugins new {kind} mine")
    folder = tmp_path / f"lmkit-{kind}-mine".replace("_", "-")
    shell.install(folder)
    install, serve, ask = blocks((folder / "README.md").read_text())
    assert f"lmkit plugins show {kind}:{entry_name(kind, 'mine')}" in install
    assert folder.name in shell.run(install.splitlines()[1])
    said = shell.served(serve, ask)
    if kind == "dialect":
        assert said == "2 + 3 = 5"
        return
    (choice,) = json.loads(said)["choices"]
    if kind == "logits_processor":
        assert "5" not in choice["message"]["content"], "the token that the request forbids"
    elif kind == "tool_parser":
        assert choice["message"]["tool_calls"][0]["function"]["name"] == "get_time"
    else:
        assert choice["message"]["content"] == "2 + 3 = 5"
    if kind == "extension":
        assert "engine for demo is up" in (tmp_path / "server.log").read_text()


def test_a_model_family(tmp_path: Path) -> None:
    """docs/add_a_model.md to the letter: the scaffold is a Llama, and becomes Mellum by what the page says."""
    shell = Shell(tmp_path)
    page = (DOCS / "add_a_model.md").read_text()
    fenced = re.findall(r"^```(\w*)\n(.+?)^```$", page, re.MULTILINE | re.DOTALL)
    typed, python = ([text for kind, text in fenced if kind == wanted] for wanted in ("", "python"))
    new, _, run = typed[0].splitlines()
    shell.run(new)
    folder = tmp_path / "lmkit-model-mellum"
    source, test = folder / "src" / "lmkit_model_mellum", folder / "tests" / "test_lmkit_model_mellum.py"
    shell.install(folder)
    shell.run(run)  # as it was written
    test.write_text(python[0])
    (source / "arch.py").write_text(python[1])
    features = re.search(r"`(features=[^`]+)`\.", page)
    assert features is not None
    hooks = (source / "hooks.py").read_text()
    (source / "hooks.py").write_text(hooks.replace('features=frozenset({"causal"})', features[1]))
    shell.install(folder)
    shell.run(run)
    said = json.loads(shell.served(typed[1].strip(), typed[2]))
    assert said["usage"]["completion_tokens"] == 8

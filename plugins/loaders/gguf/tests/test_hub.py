"""Files of a hub's repository, from a small hub of our own."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from lmkit.api import CheckpointError
from lmkit_loader_gguf.hub import choices, choose, short
from lmkit_testing.checkpoints import tiny_checkpoint

pytest.importorskip("gguf", reason="files are written with the library gguf")
from lmkit_testing.gguf_files import write

COMMIT = "0123456789" * 4
# Looks for each reference, and prints what was found or why not.
SCRIPT = """
import json, sys
from lmkit.api import CheckpointError, CheckpointOptions
from lmkit.plugins.host import PluginHost
host = PluginHost()
for line in json.loads(sys.argv[1]):
    ref, offline = line
    options = CheckpointOptions(cache_dir=sys.argv[2], offline=offline)
    try:
        found = host.first("lmkit_resolve_checkpoint", ref=ref, options=options)
        print(json.dumps([found.format, [f.name for f in found.files], found.config["architectures"], found.name]))
    except CheckpointError as e:
        print(json.dumps([f"{e.message} / {e.fix}"]))
"""


class Hub(ThreadingHTTPServer):
    """Repositories as path -> content; says what it was asked for."""

    def __init__(self, repositories: Mapping[str, Mapping[str, bytes]]) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.repositories, self.asked = repositories, list[str]()


class Answer(BaseHTTPRequestHandler):
    server: Hub

    def log_message(self, format: str, *args: Any) -> None:
        return

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.partition("?")[0].strip("/").removeprefix("api/models/")
        self.server.asked.append(f"{self.command} {path}")
        org, name, *rest = path.split("/")
        files = self.server.repositories.get(f"{org}/{name}")
        if files is None:
            return self._send(404, b"", {"X-Error-Code": "RepoNotFound"})
        if rest[:1] == ["resolve"]:
            content = files["/".join(rest[2:])]
            return self._send(200, content, {"ETag": f'"{hashlib.sha1(content).hexdigest()}"'})
        siblings = [{"rfilename": name, "size": len(content)} for name, content in files.items()]
        tree = [
            {"type": "file", "path": name, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
            for name, content in files.items()
        ]
        body = tree if rest[:1] == ["tree"] else {"id": f"{org}/{name}", "sha": COMMIT, "siblings": siblings}
        return self._send(200, json.dumps(body).encode(), {"Content-Type": "application/json"})

    def _send(self, status: int, content: bytes, headers: Mapping[str, str]) -> None:
        self.send_response(status)
        for key, value in {"X-Repo-Commit": COMMIT, "Content-Length": str(len(content)), **headers}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hub]:
    folder = tmp_path_factory.mktemp("hub")
    plain = tiny_checkpoint("LlamaForCausalLM", folder / "plain", hidden_size=32, num_attention_heads=2)
    file = write(plain, folder / "m.gguf", "llama").read_bytes()
    ordinary = {path.name: path.read_bytes() for path in plain.iterdir() if path.is_file()}
    server = Hub(
        {
            "org/one": {"README.md": b"#", "config.json": b"{}", "m.gguf": file, "mmproj-F16.gguf": b"images"},
            "org/several": {"m-Q8_0.gguf": file, "m-Q4_K_M.gguf": b"not read", "BF16/m-BF16.gguf": file},
            "org/both": {**ordinary, "m-Q8_0.gguf": file},
        }
    )
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()


def look(hub: Hub, cache: Path, *refs: tuple[str, bool]) -> list[list[Any]]:
    environment = {**os.environ, "HF_ENDPOINT": f"http://127.0.0.1:{hub.server_port}", "HF_HUB_DISABLE_XET": "1"}
    environment |= {"HF_HOME": str(cache), "HF_HUB_OFFLINE": "0"}
    command = [sys.executable, "-c", SCRIPT, json.dumps(refs), str(cache)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=300)
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_repositories(hub: Hub, tmp_path: Path) -> None:
    refs = [
        "org/one", "org/several", "org/several:q8_0", "org/several:bf16", "org/several:Q5_K", "org/both",
        "org/both:Q8_0", "org/none:Q8_0", "org/none",
    ]  # fmt: skip
    one, several, q8, bf16, q5, both, quantized, none, absent = look(hub, tmp_path, *((ref, False) for ref in refs))
    llama = ["LlamaForCausalLM"]
    assert one == ["gguf", ["m.gguf"], llama, "one"]
    listed = "org/several has several checkpoints: BF16 (0.00 GB), Q4_K_M (0.00 GB), Q8_0 (0.00 GB)"
    assert several == [f"{listed} / name one: org/several:BF16"]
    assert q8 == ["gguf", ["m-Q8_0.gguf"], llama, "several:q8_0"]
    assert bf16 == ["gguf", ["m-BF16.gguf"], llama, "several:bf16"]
    assert "no GGUF file called Q5_K; it has BF16" in q5[0]
    assert both == ["safetensors", ["model.safetensors"], llama, "both"]
    assert quantized == ["gguf", ["m-Q8_0.gguf"], llama, "both:Q8_0"]
    assert none == absent == ["the hub has no checkpoint 'org/none', or it is private / check the spelling"]
    loaded = {line for line in hub.asked if line.startswith("GET") and line.endswith(".gguf")}
    assert not any("Q4_K_M" in line or "mmproj" in line for line in loaded), "only what was chosen is downloaded"
    before = len(hub.asked)
    again = look(hub, tmp_path, ("org/one", True), ("org/several:Q8_0", True), ("org/several:Q4_K_M", True))
    assert again[:2] == [one, [*q8[:3], "several:Q8_0"]]
    assert "no GGUF file called Q4_K_M; it has BF16 (0.00 GB), Q8_0" in again[2][0]
    assert len(hub.asked) == before, "nothing is asked offline"


def test_a_split_file_is_one_choice() -> None:
    files = {f"Q4_K_M/big-Q4_K_M-0000{i}-of-00002.gguf": 10**9 for i in (2, 1)} | {"big-UD-Q4_K_XL.gguf": 5}
    files |= {"big-Q4_K.gguf": 1, "imatrix_x.gguf": 2, "README.md": 3}
    sets = choices(files)
    assert [short(stem) for stem in sets] == ["Q4_K_M", "Q4_K", "UD-Q4_K_XL"]
    parts = [f"Q4_K_M/big-Q4_K_M-0000{i}-of-00002.gguf" for i in (1, 2)]
    assert choose("o/r", "Q4_K_M", sets, files) == parts
    assert choose("o/r", "q4_k", sets, files) == ["big-Q4_K.gguf"]
    assert choose("o/r", "Q4_K_XL", sets, files) == choose("o/r", "big-UD-Q4_K_XL.gguf", sets, files)
    with pytest.raises(CheckpointError, match=r"Q4_K_M \(2\.00 GB\)"):
        choose("o/r", None, sets, files)

"""The Dockerfiles without a container engine: what they say, and the steps of the CPU image in a folder of its own.

The steps take minutes and gigabytes: DEPLOY_STEPS=1, as `nox -s deploy` sets it.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import httpx
import pytest

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted((ROOT / "deploy" / "docker").glob("*.Dockerfile"))
CPU = ROOT / "deploy" / "docker" / "cpu.Dockerfile"
OTHERS = ("apt-get ", "groupadd ")  # steps that change the system; the machine has what they install
USER = 10001


def steps_of(file: Path) -> list[Any]:
    return list(pytest.importorskip("dockerfile").parse_file(str(file)))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_an_image_runs_as_nobody_and_ends_by_signal(file: Path) -> None:
    steps = steps_of(file)
    last = [i for i, step in enumerate(steps) if step.cmd.upper() == "FROM"][-1]
    final = {step.cmd.upper(): step for step in steps[last:]}
    assert final["USER"].value == (f"{USER}:{USER}",)
    assert final["ENTRYPOINT"].json  # not a shell, which would keep the signal to itself
    assert "HEALTHCHECK" in final
    said = " ".join(value for step in steps for value in step.value)
    assert not re.search(r"(?i)\b(secret|password|token|api_key)=", said)
    sources = {step.value[0] for step in steps[last:] if step.cmd.upper() == "COPY"}
    assert sources == {"/opt/lmkit"}  # no compiler, no source


def test_images_differ_where_they_must_only() -> None:
    cpu, cuda = ([line for line in file.read_text().splitlines() if line[:1] != "#"] for file in FILES)
    assert {f.stem for f in FILES} == {"cpu", "cuda"}
    assert [line for line in cpu if line not in cuda and not line.startswith(("ARG", " "))] == []


def build_context(folder: Path) -> None:
    """What `COPY . .` copies: the files of the repository that .dockerignore lets through."""
    rules = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and line[0] != "#"]
    kept = {rule[1:] for rule in rules if rule.startswith("!")}
    never = [rule.removeprefix("**/") for rule in rules if rule.startswith("**/")]
    assert {"*"} == {rule for rule in rules if not rule.startswith(("!", "**/"))}
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    for name in subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0"):
        parts = Path(name).parts
        if name and parts[0] in kept and not any(fnmatch(part, rule) for part in parts for rule in never):
            target = folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, target)


def files_in(folder: Path) -> dict[str, tuple[int, int]]:
    return {str(p): (p.lstat().st_mtime_ns, p.lstat().st_size) for p in sorted(folder.rglob("*"))}


@pytest.mark.slow
@pytest.mark.skipif(not os.environ.get("DEPLOY_STEPS"), reason="DEPLOY_STEPS=1 runs the steps of the image")
def test_the_steps_of_the_image_make_a_server(tmp_path: Path) -> None:
    """Its RUN lines as they stand, with /src, /wheels, /opt and /models in a folder; then its entry point, as its user
    where that may run Python, with a key: it must answer and write nothing where the image is read-only."""
    steps = steps_of(CPU)
    os.chmod(tmp_path, 0o755)
    for parent in tmp_path.parents[:3]:  # the user of the image must get there
        if parent.stat().st_uid == os.geteuid() and parent != Path("/"):
            os.chmod(parent, parent.stat().st_mode | 0o011)
    for name in ("src", "opt", "models", "tmp"):
        (tmp_path / name).mkdir()
    os.chmod(tmp_path / "tmp", 0o777)

    def placed(text: str) -> str:
        return re.sub(r"(?<![\w./])/(src|wheels|opt|models|tmp)\b", rf"{tmp_path}/\1", text)

    path = f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin"
    env = {"PATH": path, "HOME": str(tmp_path / "tmp")}
    env |= {name: value for name, value in os.environ.items() if name.startswith("PIP_")}
    final: dict[str, Any] = {}
    ran = []
    for step in steps:
        kind = step.cmd.upper()
        if kind == "ARG":
            env[step.value[0].partition("=")[0]] = ""  # torch of the package index: no other one is asked here
        elif kind == "COPY" and step.value[0] == ".":
            build_context(tmp_path / "src")
        elif kind == "RUN" and not step.value[0].startswith(OTHERS):
            ran.append(step.value[0])
            isa = {"BUILD_ISA": os.environ.get("BUILD_ISA", "")} if "pip wheel" in step.value[0] else {}
            subprocess.run(["sh", "-ec", placed(step.value[0])], cwd=tmp_path / "src", env=env | isa, check=True)
        final[kind] = step
    assert len(ran) == 5, ran
    shutil.rmtree(tmp_path / "src")  # the second stage has none of it
    shutil.rmtree(tmp_path / "wheels")
    subprocess.run(["chmod", "-R", "a+rX", str(tmp_path / "opt")], check=True)
    check_server(tmp_path, final, placed, path)


def check_server(tmp_path: Path, final: dict[str, Any], placed: Callable[[str], str], path: str) -> None:
    before = files_in(tmp_path / "opt")

    given = dict(zip(final["ENV"].value[::2], final["ENV"].value[1::2], strict=True))
    run_env = {name: placed(value).replace("$PATH", path) for name, value in given.items()}
    run_env["TMPDIR"] = str(tmp_path / "tmp")
    entry = [*final["ENTRYPOINT"].value, "--port", "0"]
    program = shutil.which(entry[0], path=run_env["PATH"])
    assert program == str(tmp_path / "opt/lmkit/bin/lmkit")
    python = Path(sys.executable).resolve()
    reachable = all(folder.stat().st_mode & 0o001 for folder in python.parents)  # not so in the home of root
    who = {"user": USER, "group": USER, "extra_groups": []} if os.geteuid() == 0 and reachable else {}
    options: dict[str, Any] = {"cwd": tmp_path / "tmp", **who}
    refused = subprocess.run([program, *entry[1:]], env=run_env, capture_output=True, text=True, timeout=120, **options)
    assert refused.returncode != 0
    assert "no API key" in refused.stderr
    said = tmp_path / "said"
    with open(said, "w") as out:
        environment = run_env | {"LMKIT_API_KEY": "k"}
        server = subprocess.Popen([program, *entry[1:]], env=environment, stdout=out, stderr=out, **options)
    try:
        url = None
        while url is None and server.poll() is None:
            time.sleep(0.2)
            url = re.search(r"http://0\.0\.0\.0:(\d+)/v1", said.read_text())
        assert url is not None, said.read_text()
        with httpx.Client(base_url=f"http://127.0.0.1:{url[1]}", timeout=60) as client:
            assert client.get("/ready").status_code == 200
            body = {"model": "demo", "messages": [{"role": "user", "content": "What is 17 + 25?"}], "temperature": 0}
            assert client.post("/v1/chat/completions", json=body).status_code == 401
            answer = client.post("/v1/chat/completions", json=body, headers={"Authorization": "Bearer k"}).json()
            assert "42" in json.dumps(answer)
    finally:
        server.terminate()
        assert server.wait(60) == 0
    assert files_in(tmp_path / "opt") == before

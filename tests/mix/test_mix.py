"""Mix and match: any subset of plugins installs; what is there works, what is missing is explained."""

from __future__ import annotations

import json
import random
import re
import shutil
import tomllib
from collections.abc import Iterable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DEFAULT = [
    line.split("./", 1)[1].split("[")[0]
    for line in (ROOT / "requirements.txt").read_text().splitlines()
    if line.startswith("-e ./plugins/")
]
PROJECTS = {p: tomllib.loads((ROOT / p / "pyproject.toml").read_text())["project"] for p in ("core", *DEFAULT)}
LIBRARIES = [path for path in DEFAULT if "entry-points" not in PROJECTS[path]]
FRONT = [path for path in DEFAULT if path.startswith("plugins/frontends/")]  # released with the core


def brought(path: str) -> set[str]:
    """Folders of what pip brings of this repository beside the dist in `path`."""
    names = {re.split(r"[<>=\[]", dep)[0] for dep in PROJECTS[path].get("dependencies", ())}
    found = {other for other in DEFAULT if PROJECTS[other]["name"] in names}
    return found.union(*map(brought, found))


ALWAYS = list(dict.fromkeys(["core", *FRONT, *LIBRARIES, *brought("core")]))  # this is not for choosing
PLUGINS = [path for path in DEFAULT if path not in ALWAYS]
NEEDED = (  # what generating with the demo checkpoint cannot do without: one of each
    ("plugins/platforms/cpu",),
    ("plugins/attention/torch", "plugins/attention/cpu"),
    ("plugins/models/llama", "plugins/models/transformers"),  # which runs what nobody else knows
    ("plugins/models/demo",),
    ("plugins/schedulers/fcfs", "plugins/schedulers/fair"),
)
GENERATE = (
    "from lmkit import LLM, SamplingParams\n"
    "out = LLM('demo').generate('What is 2 + 3?', SamplingParams(max_tokens=4, temperature=0, ignore_eos=True))\n"
    "out = out[0] if isinstance(out, list) else out\n"
    "print('TOKENS', len(out.token_ids))\n"
)


def listed(stdout: str) -> set[str]:
    """Dist names in the output of `lmkit plugins list --json`."""
    data = json.loads(stdout)
    rows = data if isinstance(data, list) else data["plugins"]
    return {row["dist"] for row in rows}


def with_plugins(paths: Iterable[str]) -> set[str]:
    """Names of those dists that bring plugins: a library or a front end brings none."""
    projects = [PROJECTS[path] for path in paths]
    return {project["name"] for project in projects if {*project.get("entry-points", ())} - {"lmkit.command"}}


@pytest.mark.full
def test_core_alone_lists_and_explains(make_env) -> None:
    env = make_env(["core", *FRONT])
    done = env.run("lmkit", "plugins", "list", "--json")
    assert done.returncode == 0, done.stderr
    assert listed(done.stdout) == with_plugins(["core", *FRONT])

    done = env.run("lmkit", "explain", "attention", "--device", "cuda:9.0:80GB")
    text = done.stdout + done.stderr
    assert "Traceback" not in text
    assert "not installed" in text or "not-installed" in text
    assert "plugins/attention/" in text

    folders = {"executor": "executors/worker", "tokenizer": "tokenizers/json", "renderer": "tokenizers/json"}
    for kind, folder in folders.items():
        done = env.run("lmkit", "explain", kind)
        assert f"plugins/{folder}" in done.stdout + done.stderr

    done = env.run("lmkit", "serve", "demo", "--port", "0")
    assert done.returncode != 0
    assert "Traceback" not in done.stderr + done.stdout
    assert "pip install" in done.stderr + done.stdout


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.full) for seed in (1, 2, 3))])
def test_random_subsets(make_env, seed: int) -> None:
    rng = random.Random(seed)
    subset = [p for p in PLUGINS if rng.random() < 0.8]
    env = make_env([*ALWAYS, *subset])
    done = env.run("lmkit", "plugins", "list", "--json")
    assert done.returncode == 0, done.stderr
    assert listed(done.stdout) == with_plugins([*ALWAYS, *subset])

    missing = [paths for paths in NEEDED if not set(paths) & set(subset)]
    done = env.run("python", "-c", GENERATE)
    if not missing:
        assert done.returncode == 0, done.stderr
        assert "TOKENS" in done.stdout
    else:
        assert done.returncode != 0
        assert "pip install -e" in done.stderr, done.stderr[-2000:]


@pytest.mark.full
def test_default_set_generates(make_env) -> None:
    env = make_env(["core", *DEFAULT])
    done = env.run("python", "-c", GENERATE)
    assert done.returncode == 0, done.stderr
    done = env.run("lmkit", "plugins", "doctor", "--strict")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.full
def test_a_third_party_plugin_serves(make_env, tmp_path: Path) -> None:
    """Written outside the repository, pip-installed, selected by name; the core does not know it."""
    outside = tmp_path / "their_project"
    shutil.copytree(ROOT / "examples" / "plugins" / "attention", outside)
    env = make_env(["core", *DEFAULT])
    env.pip_install(outside)
    done = env.run("lmkit", "plugins", "list", "--json")
    assert "lmkit-attention-simple" in listed(done.stdout)

    code = GENERATE.replace("LLM('demo')", "LLM('demo', attention='simple')")
    done = env.run("python", "-c", code)
    assert done.returncode == 0, done.stderr
    assert "TOKENS 4" in done.stdout

    served = SERVE.replace("ATTENTION", "simple")
    done = env.run("python", "-c", served, timeout=180)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "42" in done.stdout


SERVE = """
import re, subprocess, sys, time, httpx, os, socket
with socket.socket() as s:
    s.bind(("127.0.0.1", 0)); port = s.getsockname()[1]
lmkit = os.path.join(os.path.dirname(sys.executable), "lmkit")
server = subprocess.Popen([lmkit, "serve", "demo", "--attention", "ATTENTION", "--port", str(port)])
try:
    for _ in range(300):
        try:
            if httpx.get(f"http://127.0.0.1:{port}/ready").status_code == 200: break
        except httpx.HTTPError: pass
        time.sleep(0.2)
    body = {"model": "demo", "temperature": 0, "messages": [{"role": "user", "content": "What is 17 + 25?"}]}
    reply = httpx.post(f"http://127.0.0.1:{port}/v1/chat/completions", json=body, timeout=60).json()
    print(reply["choices"][0]["message"]["content"])
finally:
    server.terminate(); server.wait(30)
"""

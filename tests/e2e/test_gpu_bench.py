"""bench/gpu.sh without a GPU: every part at the size of a toy, through the code that a GPU runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
BENCH = ROOT / "bench" / "gpu"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Modules of the bench, as where it runs; forgotten afterwards."""
    monkeypatch.syspath_prepend(str(BENCH))
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if getattr(sys.modules[name], "__file__", None) and str(BENCH) in str(sys.modules[name].__file__):
            del sys.modules[name]


def run(out: Path, *arguments: str) -> tuple[int, str, list[dict[str, Any]]]:
    """The command; its status, what it printed, and its raw results."""
    env = {**os.environ, "OUT": str(out), "PYTHON": sys.executable}
    done = subprocess.run(
        [str(ROOT / "bench" / "gpu.sh"), *arguments], capture_output=True, text=True, env=env, check=False, timeout=550
    )
    raw = list(out.glob("gpu-*.json"))
    return done.returncode, done.stdout + done.stderr, json.loads(raw[0].read_text()) if raw else []


@pytest.mark.full("lmkit-gpu", "lmkit-bench")
def test_a_model_is_measured_against_the_device(tmp_path: Path) -> None:
    code, text, lines = run(tmp_path, "--cpu", "--parts", "limits,large")
    assert code == 0, text
    values = {line["name"]: line["value"] for line in lines}
    for name in ("copy", "gemm", "8b decode", "8b decode share", "8b prefill share", "8b batch"):
        assert values[name] > 0
        assert not any("failed" in line for line in lines)
    assert "| 8B bfloat16, decoding one row |" in text
    assert "0 failures" in text


@pytest.mark.full("lmkit-gpu")
def test_every_part(tmp_path: Path) -> None:
    code, text, lines = run(tmp_path, "--cpu")
    assert code == 0, text
    values = {line["name"]: line["value"] for line in lines}
    assert "0 failures" in text
    assert values["8b ready"] > 0
    assert values["parity: torch, float32, depth 1"] == 1
    assert min(values[f"conformance: {name}"] for name in ("platform", "attention", "operators")) >= 10
    assert values["linear int4 8x128->256"] > 0
    assert values["demo: What is 17 + 25?"] == "17 + 25 = 42"


@pytest.mark.full("lmkit-platform-gpu")
def test_what_fails_is_written_down_and_the_next_part_runs(tmp_path: Path) -> None:
    """No device, and a part whose time is over."""
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    code, text, lines = run(tmp_path, "--small", "--parts", "large,limits", "--seconds", "40")
    assert code == 1
    failed = {line["part"] for line in lines if "failed" in line}
    assert failed == {"large", "limits"}
    assert "FAILED large" in text


@pytest.mark.usefixtures("bench")
def test_a_part_that_does_not_end_is_ended(tmp_path: Path) -> None:
    import run as runner
    from report import Report

    args = runner.arguments(["--cpu"])
    runner.run_part("limits", tmp_path / "lines", args, tmp_path, tmp_path, 0.05)
    failed, took = Report(tmp_path / "lines", "").lines()
    assert "ended after" in failed["failed"]
    assert took["value"] < 30


@pytest.mark.usefixtures("bench")
def test_lmkit_is_found_without_being_installed(tmp_path: Path) -> None:
    """Packages by links, plugins by entry points; wheels for what is missing alone."""
    import zipfile

    from site_folder import make, projects

    for name in ("absent_thing-1.0", f"torch-{torch.__version__}"):
        with zipfile.ZipFile(tmp_path / f"{name}-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"{name.split('-')[0]}/__init__.py", "here = True")
    site = tmp_path / "site"
    assert make(site, tmp_path) == ["absent_thing-1.0-py3-none-any.whl"]
    assert (site / "absent_thing" / "__init__.py").exists()
    assert not (site / "torch").exists()
    found = {d.metadata["Name"]: d for d in metadata.distributions(path=[str(site)])}
    assert set(found) == {project["name"] for project in projects().values()}
    points = {(p.group, p.name): p.value for p in found["lmkit-platform-cuda"].entry_points}
    assert points["lmkit.platform", "cuda"] == "lmkit_platform_cuda.hooks"
    assert (site / "lmkit_platform_cuda" / "hooks.py").exists()


@pytest.mark.usefixtures("bench")
@pytest.mark.parametrize("captured", [True, False])
def test_times_of_a_gpu_are_those_of_its_own_clock(
    monkeypatch: pytest.MonkeyPatch, captured: bool, tmp_path: Path
) -> None:
    """Calls are captured once and replayed; launched one by one where they cannot be. A device of paper."""
    from machine import Machine

    clock, ran = SimpleNamespace(now=0.0), []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            self.at = 0.0

        def record(self) -> None:
            self.at = clock.now

        def synchronize(self) -> None:
            pass

        def elapsed_time(self, other: Event) -> float:
            return (other.at - self.at) * 1e3

    class Graph:
        def __enter__(self) -> None:
            if not captured:
                raise RuntimeError("not while capturing")

        def __exit__(self, *_: object) -> None:
            pass

        def replay(self) -> None:
            clock.now += 12.0

    def call() -> None:
        ran.append(1)
        clock.now += 5.0

    paper = SimpleNamespace(Event=Event, CUDAGraph=Graph, graph=lambda graph: graph, synchronize=lambda: None)
    monkeypatch.setattr(torch, "cuda", paper)
    taken = Machine("gpu", True, tmp_path).seconds([call] * 4)
    assert taken == ((3.0, True) if captured else (5.0, False))
    assert len(ran) == 2 + (4 if captured else 4 * 7)

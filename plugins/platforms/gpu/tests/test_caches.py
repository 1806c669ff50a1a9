"""Where compiled kernels are kept, and that those compiled in a step are counted and named."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from lmkit.api import ConfigError, EngineConfig, EngineRequest, SamplingParams
from lmkit.config import from_options
from lmkit.engine.core import EngineCore
from lmkit.engine.intake import Intake
from lmkit.memory import plan_kv
from lmkit.plugins.resolve import resolve
from lmkit.scheduling.scheduler import Scheduler
from lmkit_gpu import GpuPlatform
from lmkit_gpu.caches import CACHES, kernel_caches
from lmkit_gpu.graphs import GpuGraphs
from lmkit_testing.checkpoints import tiny_checkpoint
from lmkit_testing.simgpu import Gpu, SimRuntime, simulated
from lmkit_testing.simsteps import MAX_LENGTH, STEADY
from lmkit_testing.stepper import ArrivalOrder
from lmkit_worker.uniproc import UniprocExecutor

triton = pytest.importorskip("triton", reason="triton is not installed")


@pytest.fixture
def gpu() -> Iterator[Gpu]:
    with simulated() as device:
        yield device


def test_several_engines_are_refused_where_each_would_take_the_first_device() -> None:
    several = from_options({"dp": 2})
    with pytest.raises(ConfigError, match="--dp 2"):
        GpuPlatform(SimRuntime()).worker_env(several, 0)


def test_one_folder_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in CACHES:
        monkeypatch.delenv(name, raising=False)  # torch sets one when it compiles
    found = kernel_caches({"XDG_CACHE_HOME": "/var/cache/x", "TRITON_CACHE_DIR": "/mine"})
    assert found.keys() == CACHES.keys() - {"TRITON_CACHE_DIR"}
    assert {Path(path).parent for path in found.values()} == {Path("/var/cache/x/lmkit/kernels")}
    for unset in ({}, {"XDG_CACHE_HOME": ""}, {"XDG_CACHE_HOME": "relative"}):
        assert {Path(path).parent for path in kernel_caches(unset).values()} == {Path.home() / ".cache/lmkit/kernels"}
    assert GpuPlatform.worker_env(GpuPlatform(SimRuntime()), EngineConfig(), 0).keys() >= set(CACHES) - {"HOME"}


COMPILING = """
import triton
from lmkit_worker.compiles import Compiles
from triton import language
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

@triton.jit
def copied(x, y, size: language.constexpr):
    at = language.arange(0, size)
    language.store(y + at, language.load(x + at))

def compile(size):
    types = {"x": "*fp32", "y": "*fp32", "size": "constexpr"}
    triton.compile(ASTSource(fn=copied, signature=types, constexprs={(2,): size}), target=GPUTarget("cuda", 90, 32))

heard = []
triton.knobs.compilation.listener = lambda *, cache_hit, **_: heard.append(cache_hit)
compiles = Compiles()
compiles.listen()
compiles.listen()
for size in (16, 16, 32):
    compile(size)
    print(*compiles.take(), heard.pop())
"""


def test_compiled_kernels_are_named(tmp_path: Path) -> None:
    """Once: what the folder has is compiled by nobody. In a process of its own: this one interprets kernels."""
    script = tmp_path / "compiling.py"
    script.write_text(COMPILING)
    environment = {k: v for k, v in os.environ.items() if not k.startswith("TRITON_")}
    environment |= kernel_caches({"XDG_CACHE_HOME": str(tmp_path)}) | {"TRITON_DEFAULT_FP_FUSION": "1"}
    done = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["copied False", "True", "copied False"]
    assert list((tmp_path / "lmkit/kernels/triton").rglob("copied.cubin"))


@pytest.mark.slow
def test_a_step_that_compiles_is_told_apart(
    gpu: Gpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What is compiled before an engine is ready counts for nothing, nor what is while it is idle."""
    path = tiny_checkpoint("llama", tmp_path / "llama", num_hidden_layers=1, head_dim=16)
    options = {"model": str(path), "max_length": MAX_LENGTH, "device": "cuda:9.0:141GB", "attention": "torch"}
    config = from_options({**options, "dtype": "float32", "max_rows": 2, "max_step_tokens": 16, "num_blocks": 20})
    plan, checkpoint, _ = resolve(config)
    executor = UniprocExecutor(config, plan, checkpoint)
    assert executor.worker is not None
    executor.worker.platform = GpuPlatform(SimRuntime())
    facts = executor.start()
    monkeypatch.setattr(triton.knobs.compilation, "listener", lambda **_: None)
    run = GpuGraphs.run

    def compiles(self, forward, x):
        if wanted:
            triton.knobs.compilation.listener(src=SimpleNamespace(name="copied"), cache_hit=False, metadata={})
        return run(self, forward, x)

    monkeypatch.setattr(GpuGraphs, "run", compiles)
    wanted = True
    kv = plan_kv(facts, config, max_length=MAX_LENGTH)
    executor.configure_kv(kv, STEADY)
    core = EngineCore(Scheduler(STEADY, kv, ArrivalOrder()), executor, Intake(512, MAX_LENGTH))
    core.add(EngineRequest("r", [5, 6, 7], SamplingParams(max_tokens=1, temperature=0)))
    with caplog.at_level(logging.WARNING, "lmkit.worker"):
        while core.has_work():
            core.step()
    assert core.num_compiled == 1
    assert "compiled: copied" in caplog.text
    while core.work_ahead():
        pass
    wanted = False
    core.add(EngineRequest("s", [5, 6, 7], SamplingParams(max_tokens=2, temperature=0)))
    while core.has_work():
        core.step()
    assert core.num_compiled == 1

"""Memory on the simulated device, where it is counted: what a step takes is measured before the cache is sized."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lmkit.api import CapacityError, EngineRequest, SamplingParams, SchedLimits, WorkerFacts
from lmkit.config import from_options
from lmkit.engine.core import EngineCore
from lmkit.engine.intake import Intake
from lmkit.memory import plan_kv
from lmkit.plugins.resolve import resolve
from lmkit.scheduling.scheduler import Scheduler
from lmkit_attention_triton.backend import TritonAttention
from lmkit_gpu import GpuPlatform
from lmkit_gpu import platform as module
from lmkit_testing.checkpoints import tiny_checkpoint
from lmkit_testing.one_runner import OneRunner
from lmkit_testing.simgpu import Gpu, SimRuntime, simulated
from lmkit_testing.simsteps import adapter
from lmkit_testing.stepper import ArrivalOrder
from lmkit_worker.worker import Worker

pytest.importorskip("triton", reason="triton is not installed")

MIB = 1 << 20
CAPACITY, HEADROOM, WORKSPACE = 48 * MIB, MIB, 12 * MIB
CYCLES = 64 << 10  # bytes that Triton's interpreter may hold a while, in cycles of objects
ROWS, TOKENS, LENGTH = 4, 32, 64
LIMITS = SchedLimits(max_tokens=TOKENS, max_rows=ROWS, max_length=LENGTH, eos_token_ids=(1,), depth=2)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gpu]:
    monkeypatch.setattr(module, "headroom", lambda total: HEADROOM)
    with simulated() as device:
        device.pool.capacity = CAPACITY
        yield device


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint("llama", tmp_path_factory.mktemp("memory") / "llama", num_hidden_layers=1, head_dim=16)


def worker(checkpoint: Path, **more: object) -> Worker:
    options = {
        **more,
        "model": str(checkpoint),
        "max_length": LENGTH,
        "device": "cuda:9.0:141GB",
        "attention": "triton",
    }
    config = from_options(
        {**options, "dtype": "float32", "max_rows": ROWS, "max_step_tokens": TOKENS, "kv_memory": "100%"}
    )
    plan, found, _ = resolve(config)
    made = Worker(config, plan, found)
    made.platform = GpuPlatform(SimRuntime())
    return made


def serve(made: Worker) -> None:
    """Loads, gives the cache all that is left, and runs the largest steps there are."""
    facts = made.load()
    kv = plan_kv(facts, made.config, max_length=LENGTH)
    assert kv.nbytes > 0.9 * facts.free_kv_bytes
    limits = LIMITS
    made.configure_kv(kv, limits)
    assert made.runner is not None
    core = EngineCore(Scheduler(limits, kv, ArrivalOrder()), OneRunner(made.runner, 2), Intake(512, LENGTH))
    params = SamplingParams(max_tokens=4, top_p=0.9, top_k=10, seed=1, ignore_eos=True)
    for i in range(ROWS):
        core.add(EngineRequest(f"r{i}", [5 + i] * TOKENS, params))
    while core.has_work():
        for event in core.step():
            assert event.error is None, event.error


def with_workspace(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    """Planners keep memory that no estimate knows."""
    real = TritonAttention.planner

    def planner(self: Any, need: Any, limits: Any, platform: Any) -> Any:
        made = real(self, need, limits, platform)
        made.workspace = torch.empty(size, dtype=torch.uint8, device="sim")
        return made

    monkeypatch.setattr(TritonAttention, "planner", planner)


@pytest.mark.full("lmkit-gpu", "lmkit-op-triton", "lmkit-worker")
def test_what_planners_keep_is_measured(gpu: Gpu, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = worker(checkpoint).load().activation_bytes
    with_workspace(monkeypatch, WORKSPACE)
    made = worker(checkpoint)
    assert abs(made.load().activation_bytes - plain - WORKSPACE) < CYCLES
    assert made.loaded is not None
    assert gpu.pool.live < made.loaded.weight_bytes + CYCLES, "nothing of the measured steps stays"


@pytest.mark.slow
def test_the_cache_takes_what_is_left(gpu: Gpu, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And no step finds the device full."""
    with_workspace(monkeypatch, WORKSPACE)
    serve(worker(checkpoint))
    assert gpu.pool.peak <= CAPACITY


@pytest.mark.slow
def test_adapters_that_may_come_have_their_room(gpu: Gpu, checkpoint: Path) -> None:
    """As much as tables take of the largest adapters: columns of a and rows of b of each linear, and the embedding."""
    plain = worker(checkpoint).load().activation_bytes
    made = worker(checkpoint, enable_lora=True, max_loras=2, max_lora_rank=8)
    reserved = made.load().activation_bytes - plain
    made.configure_kv(plan_kv(WorkerFacts(MIB, 0, 0, made.info.kv_specs(16, "float32")), made.config), LIMITS)
    bank = made.runner.adapters
    for name in ("a", "b"):
        bank.load(adapter(made.loaded.model, name, 8))
    tables = [table for name, table in bank.tables.tables.items() if name != "lm_head"]
    taken = sum(table.a.nbytes + sum(span.b.nbytes for span in table.spans) for table in tables)
    assert 0 < taken <= reserved + CYCLES


@pytest.mark.slow
def test_what_is_estimated_is_found_out(gpu: Gpu, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same device, with a platform that does not measure."""
    with_workspace(monkeypatch, WORKSPACE)
    monkeypatch.setattr(GpuPlatform, "measure", lambda self, work: None)
    with pytest.raises(torch.OutOfMemoryError):
        serve(worker(checkpoint))


@pytest.mark.full
def test_a_step_that_does_not_fit_is_refused(gpu: Gpu, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_workspace(monkeypatch, CAPACITY)
    with pytest.raises(CapacityError, match="a step of 32 tokens and 4 rows") as refused:
        worker(checkpoint).load()
    assert "--max-step-tokens" in refused.value.fix

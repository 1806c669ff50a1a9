"""Ranks on simulated devices, each a process: what torch.distributed sends is sent by gloo, from the host in truth."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from lmkit.api import ConfigError, EngineRequest, SamplingParams, SchedLimits
from lmkit.config import from_options
from lmkit.engine.core import EngineCore
from lmkit.engine.intake import Intake
from lmkit.memory import plan_kv
from lmkit.plugins.resolve import resolve
from lmkit.scheduling.scheduler import Scheduler
from lmkit_gpu import GpuPlatform, TorchRuntime
from lmkit_testing.checkpoints import tiny_checkpoint
from lmkit_testing.one_runner import OneRunner
from lmkit_testing.simgpu import Gpu, SimRuntime, simulated
from lmkit_testing.simsteps import MAX_LENGTH, runner, tokens
from lmkit_testing.stepper import ArrivalOrder
from lmkit_testing.toy import ToyPlatform
from lmkit_worker.worker import Worker

pytest.importorskip("triton", reason="triton is not installed")

SIZE = 2
LIMITS = SchedLimits(max_tokens=16, max_rows=4, max_length=MAX_LENGTH, eos_token_ids=(1,), depth=2)
PARAMS = [
    SamplingParams(temperature=0, max_tokens=8, ignore_eos=True),
    SamplingParams(temperature=0.8, top_p=0.9, top_k=20, seed=3, max_tokens=6, ignore_eos=True),
    SamplingParams(temperature=0, max_tokens=5, ignore_eos=True),
]


def requests() -> list[EngineRequest]:
    return [EngineRequest(f"r{i}", [5 + i, 6, 7, 8], params) for i, params in enumerate(PARAMS)]


def parts_and_sums(gpu: Gpu, platform: GpuPlatform, device: torch.device, rank: int, path: str) -> None:
    """Values, and the same in a graph that is replayed with others; the host waits for nothing."""
    ranks = platform.collectives(rank, SIZE, f"file://{path}")
    x = torch.arange(6.0, device=device).view(2, 3) + rank
    gpu.strict = True
    made = ranks.all_reduce(x), *(ranks.all_gather(x.T, dim) for dim in (0, 1, -1)), ranks.broadcast(x, 1)
    replay, output = platform.runtime.capture(lambda: ranks.all_reduce(x) + 1)
    for _ in range(2):
        x.add_(1)
        replay()
    gpu.strict = False
    first = torch.arange(6.0).view(2, 3)
    both = [(first + r).T for r in range(SIZE)]
    wide = torch.cat(both, 1)
    for found, expected in zip(made, (2 * first + 1, torch.cat(both), wide, wide, first + 1), strict=True):
        assert torch.equal(found.cpu(), expected)
    assert torch.equal(output.cpu(), 2 * first + 1 + 2 * 2 + 1)


def steps(gpu: Gpu, platform: GpuPlatform, checkpoint: str, rank: int, path: str) -> dict[str, list[int]]:
    """The tokens of all requests. Each rank has an engine of its own: equal plans are made of equal requests."""
    options = {"model": checkpoint, "max_length": MAX_LENGTH, "device": "cuda:9.0:141GB", "attention": "triton"}
    config = from_options({**options, "dtype": "float32", "max_rows": 4, "max_step_tokens": 16, "tp": SIZE})
    plan, found, info = resolve(config)
    assert plan.choice("executor").name == "multiproc"  # type: ignore[union-attr]
    assert plan.value("depth") == 2
    worker = Worker(config, plan, found, rank=rank, places=[f"file://{path}"])
    worker.platform = platform
    facts = worker.load()
    assert sum(spec.num_kv_heads for spec in facts.kv_specs) * SIZE == sum(
        spec.num_kv_heads for spec in info.kv_specs(16, "float32")
    )
    kv = plan_kv(facts, from_options({**options, "num_blocks": 40}), max_length=MAX_LENGTH)
    worker.configure_kv(kv, LIMITS)
    assert worker.runner is not None
    while worker.runner.work_ahead():
        pass
    core = EngineCore(Scheduler(LIMITS, kv, ArrivalOrder()), OneRunner(worker.runner, depth=2), Intake(512, MAX_LENGTH))
    for request in requests():
        core.add(request)
    answers: dict[str, list[int]] = {}
    number = 0
    while core.has_work():
        gc.collect()
        gpu.clear()
        for event in core.step():
            assert event.error is None, event.error
            answers.setdefault(event.id, []).extend(event.tokens)
        if 1 < number < PARAMS[0].max_tokens:
            assert gpu.waits == {"event": 1}
            assert not gpu.pageable
            assert gpu.launches["graph"] == 1
        number += 1
    return answers


def work(rank: int, checkpoint: str, path: str) -> None:
    """One rank; its exit status says whether all was right."""
    with simulated() as gpu, torch.inference_mode():
        platform = GpuPlatform(SimRuntime())
        device = platform.bind(rank)
        if checkpoint:
            print(json.dumps(steps(gpu, platform, checkpoint, rank, path)))
        else:
            parts_and_sums(gpu, platform, device, rank, path)


def together(*arguments: str) -> list[str]:
    """What each rank says."""
    ranks = [
        subprocess.Popen([sys.executable, __file__, str(rank), *arguments], stdout=subprocess.PIPE, text=True)
        for rank in range(SIZE)
    ]
    said = [process.communicate()[0] for process in ranks]
    assert [process.returncode for process in ranks] == [0] * SIZE
    return said


@pytest.mark.full
def test_sums_and_parts(tmp_path: Path) -> None:
    together("", str(tmp_path / "meet"))


@pytest.mark.slow
def test_two_ranks_say_what_one_says(tmp_path: Path) -> None:
    """Heads and columns of a model divided, its steps captured with the sums in them, on one event a step."""
    checkpoint = tiny_checkpoint("llama", tmp_path / "llama", num_hidden_layers=1, head_dim=16)
    expected = tokens(*runner(checkpoint, ToyPlatform(), torch.device("cpu"), LIMITS), LIMITS, requests())
    for said in together(str(checkpoint), str(tmp_path / "meet")):
        assert json.loads(said) == expected


def test_ranks_need_a_place_to_meet() -> None:
    with pytest.raises(ValueError, match="init_method"):
        GpuPlatform(SimRuntime()).collectives(0, SIZE)


def test_a_rank_without_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ConfigError, match="rank 2 has no device: there are 2") as refused:
        TorchRuntime().select(2)
    assert refused.value.fix == "--tp 2"


def test_depth_that_ranks_do_not_have() -> None:
    config = from_options({"model": "demo", "device": "cuda:9.0:141GB", "tp": SIZE, "depth": 3})
    with pytest.raises(ConfigError, match="one step more in flight"):
        resolve(config)


if __name__ == "__main__":
    work(int(sys.argv[1]), sys.argv[2], sys.argv[3])

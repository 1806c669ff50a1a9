"""Steps of real models on the simulated device: the CPU's tokens, with waits, launches and memory counted."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from lmkit.api import EngineRequest, KVConfig, NullCollectives, SamplingParams, SchedLimits, StepLimits, describe_model
from lmkit.config import from_options
from lmkit.engine.core import EngineCore
from lmkit.engine.intake import Intake
from lmkit.plugins.resolve import resolve
from lmkit.scheduling.scheduler import Scheduler
from lmkit_gpu import GpuPlatform
from lmkit_testing.checkpoints import tiny_checkpoint
from lmkit_testing.simgpu import Gpu, SimRuntime, simulated
from lmkit_testing.stepper import ArrivalOrder
from lmkit_testing.toy import ToyPlatform
from lmkit_worker.loading.load import load_model
from lmkit_worker.runner import Runner
from lmkit_worker.uniproc import StepFuture

MAX_LENGTH = 64


@pytest.fixture
def gpu() -> Iterator[Gpu]:
    with simulated() as device:
        yield device


class Steps:
    """An executor of one runner, `depth` steps in flight."""

    def __init__(self, runner: Runner, depth: int) -> None:
        self.runner, self.depth = runner, depth

    def forward(self, plan):
        self.runner.forward(plan)

    def sample(self, step, masks):
        return StepFuture(self.runner.sample(step, masks))

    def on_failure(self, callback):
        pass


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint("llama", tmp_path_factory.mktemp("sim") / "llama")


def runner(folder: Path, platform, device: torch.device, limits: SchedLimits) -> tuple[Runner, KVConfig]:
    """With the plugins that a described GPU gets, on whatever `device` is."""
    options = {"model": str(folder), "max_length": MAX_LENGTH, "device": "cuda:9.0:141GB", "attention": "torch"}
    config = from_options({**options, "dtype": "float32"})
    plan, checkpoint, _ = resolve(config)
    info = describe_model(plan, checkpoint)
    loaded = load_model(plan, checkpoint, info, platform, device, NullCollectives())
    kv = KVConfig(tuple(info.kv_specs(16, "float32")), (40,) * len(info.kv_groups()))
    sizes = StepLimits(limits.max_rows, limits.max_tokens, 8, MAX_LENGTH)
    assert loaded.attention is not None
    return Runner(loaded, kv, sizes, [loaded.attention], platform, device, debug_kv=True), kv


def tokens(made: Runner, kv: KVConfig, limits: SchedLimits, requests: list[EngineRequest]) -> dict[str, list[int]]:
    core = EngineCore(Scheduler(limits, kv, ArrivalOrder()), Steps(made, limits.depth), Intake(512, MAX_LENGTH))
    found: dict[str, list[int]] = {r.id: [] for r in requests}
    waiting = list(requests)
    while waiting or core.has_work():
        if waiting:  # they come one by one: rows begin and end at different steps
            core.add(waiting.pop(0))
        for event in core.step():
            assert event.error is None, event.error
            found[event.id] += event.tokens
    made.check()
    return found


def requests(params: list[SamplingParams]) -> list[EngineRequest]:
    return [EngineRequest(f"r{i}", [5 + i, 6, 7, 8, 9 + i], p) for i, p in enumerate(params)]


GREEDY = [SamplingParams(temperature=0, max_tokens=5 + 3 * i, ignore_eos=True) for i in range(4)]
RANDOM = [
    SamplingParams(temperature=0.8, top_p=0.9, top_k=20, seed=3, max_tokens=9),
    SamplingParams(temperature=0, max_tokens=7, frequency_penalty=0.5),
    SamplingParams(temperature=0, max_tokens=8),
    SamplingParams(temperature=1.2, min_p=0.05, seed=4, max_tokens=12, logprobs=2),
]


@pytest.mark.parametrize("params", [GREEDY, RANDOM], ids=["greedy", "random"])
@pytest.mark.parametrize("depth", [1, 2])
def test_tokens_are_the_cpus(gpu: Gpu, checkpoint: Path, depth: int, params: list[SamplingParams]) -> None:
    limits = SchedLimits(max_tokens=16, max_rows=4, max_length=MAX_LENGTH, eos_token_ids=(1,), depth=depth)
    expected = tokens(*runner(checkpoint, ToyPlatform(), torch.device("cpu"), limits), limits, requests(params))
    platform = GpuPlatform(SimRuntime())
    made, kv = runner(checkpoint, platform, platform.bind(0), limits)
    assert {p.device.type for p in made.model.parameters()} == {"sim"}
    assert tokens(made, kv, limits, requests(params)) == expected

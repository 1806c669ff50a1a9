"""What the host does in a decode step of a GPU: everything but kernels and copies, with two steps in flight.

    python bench/host_step.py [--rows 1,256] [--length 131072] [--steps 200] [--json]

The scheduler, the worker, the planner of Triton's attention and the pinned copies of a GPU's platform are the real
ones. The device is torch's "meta": what is launched there does nothing and returns at once, so that a launch costs
what torch's dispatch does (a real one takes the driver's few microseconds more), and graphs are replayed by nobody.
Medians over decode steps in which every row takes part, of wall time. Targets: below 0.4 ms for a row, below 2 ms
for 256 rows of 128k tokens.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from time import perf_counter
from typing import Any

import numpy as np
import torch
from lmkit.api import (
    AttnNeed,
    EngineRequest,
    KVConfig,
    LayerInfo,
    ModelInfo,
    SamplingParams,
    SchedLimits,
    StepInputs,
    StepLimits,
)
from lmkit.engine.core import EngineCore
from lmkit.engine.intake import Intake
from lmkit.scheduling.scheduler import Scheduler
from lmkit_attention_triton.backend import TritonAttention
from lmkit_gpu import GpuPlatform
from lmkit_layers.rowwise import TorchRowOps
from lmkit_testing.stepper import ArrivalOrder
from lmkit_worker.future import StepFuture
from lmkit_worker.inputs import InputBuilder
from lmkit_worker.loaded import LoadedModel
from lmkit_worker.runner import Runner
from torch import Tensor

VOCAB, BLOCK, LAYERS = 128256, 16, 32
TARGETS = {(1, 131072): 0.4, (256, 131072): 2.0}  # rows, tokens of each -> ms


class Later:
    """An event that has passed once somebody waits for it."""

    def __init__(self) -> None:
        self.passed = True

    def record(self) -> None:
        self.passed = False

    def query(self) -> bool:
        return self.passed

    def synchronize(self) -> None:
        self.passed = True


class Nowhere:
    """A device that does nothing."""

    device_type = "meta"

    def select(self, index: int) -> torch.device:
        return torch.device("meta")

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.zeros(shape, dtype=dtype)

    def event(self) -> Later:
        return Later()

    def capture(self, work: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        result = work()
        return (lambda: None), result

    def memory(self) -> tuple[int, int]:
        return 1 << 37, 1 << 37

    def peak(self, work: Callable[[], None]) -> int:
        work()
        return 0


class Copied(Tensor):
    """A result on the device. Its copy on the host is made before, full of zeros."""

    __torch_function__ = torch._C._disabled_torch_function_impl
    host: Tensor

    def to(self, *_: Any, **__: Any) -> Tensor:
        return self.host


def copied(rows: int, dtype: torch.dtype) -> Copied:
    made = Tensor._make_subclass(Copied, torch.empty(rows, dtype=dtype, device="meta"))
    made.host = torch.zeros(rows, dtype=dtype)
    return made


class NoOps(TorchRowOps):
    """Draws the token 0."""

    def argmax(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return copied(len(x), torch.int64), copied(len(x), torch.float32)


class NoModel:
    """Hidden states and logits of the right shape."""

    def __init__(self) -> None:
        self.hidden = torch.zeros(1, 8, device="meta")
        self.table = torch.zeros(1, VOCAB, device="meta")

    def forward(self, x: StepInputs) -> Tensor:
        return self.hidden.expand(len(x.token_ids), -1)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.table.expand(len(hidden), -1)


class Steps:
    """An executor of one runner, two steps in flight."""

    depth = 2

    def __init__(self, runner: Runner) -> None:
        self.runner = runner

    def forward(self, plan: Any) -> None:
        self.runner.forward(plan)

    def sample(self, step: int, masks: Any) -> StepFuture:
        return StepFuture(self.runner.sample(step, masks).read)

    def on_failure(self, callback: Any) -> None:
        pass


def engine(rows: int, length: int) -> EngineCore:
    """For `rows` rows of at most `length` tokens, with the planner of an 8B model's attention."""
    need = AttnNeed(128, 32, 8, "bfloat16", "bfloat16", BLOCK)
    layers = tuple(LayerInfo(i, need) for i in range(LAYERS))
    info = ModelInfo("None", VOCAB, 4096, layers, length, "bfloat16", 0)
    blocks = rows * (-(-length // BLOCK) + 2) + 1
    kv = KVConfig(tuple(info.kv_specs(BLOCK, "bfloat16")), (blocks,))
    limits = SchedLimits(
        max_tokens=max(8192, 2 * length), max_rows=rows, max_length=length, prefix_cache=False, depth=2, watermark=0.0
    )
    platform = GpuPlatform(Nowhere())
    sizes = StepLimits(rows, limits.max_tokens, -(-(length + 1) // BLOCK), length)
    loaded = LoadedModel(NoModel(), info, 0, rows=NoOps())  # type: ignore[arg-type]
    runner = Runner(loaded, kv, sizes, [TritonAttention()], platform, platform.bind(0))
    return EngineCore(Scheduler(limits, kv, ArrivalOrder()), Steps(runner), Intake(VOCAB, length))


def decoding(rows: int, length: int, steps: int) -> EngineCore:
    """An engine whose rows all decode at about `length` tokens, with room for `steps` more steps."""
    num_output = steps + rows + 64  # the first rows decode while the prompts of the last are computed
    core = engine(rows, length + num_output)
    prompt = [5] * length
    params = SamplingParams(max_tokens=num_output, temperature=0, ignore_eos=True)
    for i in range(rows):
        core.add(EngineRequest(f"row {i}", prompt, params, arrival=float(i)))
    while any(r.num_output < 2 for r in core.scheduler.requests.values()):
        core.step()
    return core


class Clock:
    """Adds up the time spent in methods that it wraps."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def wrap(self, owner: Any, name: str, label: str) -> None:
        real = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            began = perf_counter()
            try:
                return real(*args, **kwargs)
            finally:
                self.seconds[label] = self.seconds.get(label, 0.0) + perf_counter() - began

        setattr(owner, name, timed)


PARTS = ("schedule", "rows", "inputs", "plan", "replay", "draw", "read", "update")


def measure(rows: int, length: int, steps: int) -> dict[str, float]:
    """Milliseconds of a step, whole and by part; the parts are measured in steps of their own."""
    core = decoding(rows, length, 2 * steps)
    whole = []
    for _ in range(steps):
        began = perf_counter()
        core.step()
        whole.append(perf_counter() - began)
    clock, runner = Clock(), core.executor.runner  # type: ignore[attr-defined]
    inputs: InputBuilder = runner.inputs
    clock.wrap(core.scheduler, "schedule", "schedule")
    clock.wrap(runner.rows, "apply", "rows")
    clock.wrap(inputs, "build", "build")
    clock.wrap(inputs.planners[0], "plan", "plan")
    clock.wrap(runner.graphs, "run", "replay")
    clock.wrap(core.executor, "sample", "draw")
    clock.wrap(core.scheduler, "update", "update")
    clock.wrap(core, "_take", "take")
    found: list[dict[str, float]] = []
    for _ in range(steps):
        clock.seconds.clear()
        core.step()
        spent = dict(clock.seconds)
        spent["inputs"] = spent["build"] - spent["plan"]
        spent["read"] = spent["take"] - spent["update"]
        found.append(spent)
    parts = {name: float(np.median([spent[name] for spent in found])) * 1e3 for name in PARTS}
    return {"step": float(np.median(whole)) * 1e3, **parts}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="1,256", help="numbers of rows (default: 1,256)")
    parser.add_argument("--length", type=int, default=131072, help="tokens of each row (default: 131072)")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    found = {int(rows): measure(int(rows), args.length, args.steps) for rows in args.rows.split(",")}
    if args.json:
        json.dump(found, sys.stdout)
        return 0
    print(f"host time of a decode step in ms, rows of {args.length} tokens, medians of {args.steps} steps")
    print("rows     step  " + "".join(f"{name:>10}" for name in PARTS))
    for rows, ms in found.items():
        target = TARGETS.get((rows, args.length))
        said = f"   (target: < {target} ms)" if target else ""
        print(f"{rows:4d} {ms['step']:8.3f}  " + "".join(f"{ms[name]:10.3f}" for name in PARTS) + said)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""What the worker adds to a decode step around the model: microseconds per phase, with a model that computes nothing.

    python bench/worker_overhead.py [--rows 64] [--length 512] [--groups 1] [--vocab 32000] [--steps 300]

Phases: `rows` (apply the diff), `inputs` (arrays of the step), `result` (accept tokens, build StepResult) are the
worker's own; `plan` (attention planner), `forward` and `sampling` (torch operators) belong to plugins and torch.
The target is below 10 us per row at 64 rows for the worker's own phases together.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from lmkit.api import (
    AttnBatch,
    AttnNeed,
    KVConfig,
    LayerInfo,
    ModelInfo,
    NewRow,
    RowWork,
    SamplingParams,
    StepInputs,
    StepLimits,
    StepPlan,
)
from lmkit_testing.toy import ToyAttention, ToyPlatform
from lmkit_worker.loaded import LoadedModel
from lmkit_worker.runner import Runner
from torch import Tensor

BLOCK = 16


class NoAttention(ToyAttention):
    """Plans nothing."""

    capture = "none"

    def planner(self, need: AttnNeed, limits: StepLimits, platform: Any) -> Any:
        return self

    def plan(self, batch: AttnBatch) -> Any:
        return batch


class NoModel:
    """Gives the same logits in each step."""

    def __init__(self, max_rows: int, vocab: int) -> None:
        self.hidden = torch.zeros(1, 8)
        self.table = torch.randn(max_rows, vocab)

    def forward(self, x: StepInputs) -> Tensor:
        return self.hidden.expand(len(x.token_ids), -1)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.table[: len(hidden)]


class Clock:
    """Adds up the time spent in methods that it wraps."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def wrap(self, owner: Any, name: str, label: str) -> None:
        real: Callable[..., Any] = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            try:
                return real(*args, **kwargs)
            finally:
                self.seconds[label] = self.seconds.get(label, 0.0) + time.perf_counter() - started

        setattr(owner, name, timed)


def make_runner(args: argparse.Namespace, length: int) -> Runner:
    windows = [None, *range(64, 63 + args.groups)]
    needs = [AttnNeed(1, 1, 1, dtype="float32", kv_dtype="float32", block_size=BLOCK, window=w) for w in windows]
    info = ModelInfo("None", args.vocab, 8, tuple(LayerInfo(i, n) for i, n in enumerate(needs)), length, "float32", 0)
    blocks = args.rows * (length // BLOCK + 1) + 1
    kv = KVConfig(tuple(info.kv_specs(BLOCK, "float32")), (blocks,) * args.groups)
    limits = StepLimits(args.rows, args.rows * length, length // BLOCK + 1, length)
    loaded = LoadedModel(NoModel(args.rows, args.vocab), info, 0)  # type: ignore[arg-type]
    return Runner(loaded, kv, limits, [NoAttention()] * args.groups, ToyPlatform(), torch.device("cpu"))


def decode_plans(args: argparse.Namespace) -> list[StepPlan]:
    """A prefill step, then decode steps in which each row gets a block when it needs one."""
    free = iter(range(1, 1 << 30))
    params = SamplingParams(temperature=0 if args.greedy else 1.0, seed=1, top_p=0.9 if args.top_p else 1.0)
    rows = [f"row-{i:04d}" for i in range(args.rows)]
    held = -(-args.length // BLOCK)
    prompt = list(range(args.length))
    new = [
        NewRow(id, 0, prompt, args.length, [[next(free) for _ in range(held)]] * args.groups, 0, params) for id in rows
    ]
    plans = [StepPlan(0, new=new, rows=[RowWork(id, 0, 0, args.length, [], True) for id in rows])]
    for step in range(1, args.steps + 1):
        position = args.length + step - 1
        grown = [(id, [[next(free)]] * args.groups) for id in rows] if position % BLOCK == 0 else []
        plans.append(StepPlan(step, grown=grown, rows=[RowWork(id, 0, position, 1, [], True) for id in rows]))
    return plans


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in [("rows", 64), ("length", 512), ("groups", 1), ("vocab", 32000), ("steps", 300)]:
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--random", dest="greedy", action="store_false", help="temperature 1 instead of greedy")
    parser.add_argument("--top-p", action="store_true", help="with --random: top_p 0.9")
    args = parser.parse_args()
    runner = make_runner(args, args.length + args.steps + BLOCK)
    clock = Clock()
    clock.wrap(runner, "forward", "forward in all")
    clock.wrap(runner, "sample", "sample in all")
    clock.wrap(runner.rows, "apply", "rows")
    clock.wrap(runner.inputs, "build", "inputs")
    clock.wrap(runner.graphs, "run", "forward")
    clock.wrap(runner.head.sampler, "sample", "sampling")
    clock.wrap(runner.model, "logits", "logits")
    plans = decode_plans(args)
    totals = []
    for plan in plans:
        started = time.perf_counter()
        clock.seconds.clear()
        runner.forward(plan)
        runner.sample(plan.step).read()
        totals.append({**clock.seconds, "whole": time.perf_counter() - started})
    steps = totals[1 + len(totals) // 10 :]
    median = {name: float(np.median([step.get(name, 0.0) for step in steps])) * 1e6 for name in steps[0]}
    outside = {"forward", "sampling", "logits"}
    parts = {
        "rows": median["rows"],
        "inputs": median["inputs"],
        "forward: rest": median["forward in all"] - median["rows"] - median["inputs"] - median["forward"],
        "result": median["sample in all"] - median["sampling"] - median["logits"],
    }
    print(f"{args.rows} rows of {args.length}+ tokens, {args.groups} KV group(s), median of {len(steps)} decode steps")
    for name, value in parts.items():
        print(f"  {name:14s} {value:8.1f} us/step {value / args.rows:8.2f} us/row")
    own = sum(parts.values())
    print(f"  {'worker':14s} {own:8.1f} us/step {own / args.rows:8.2f} us/row   (target at 64 rows: < 10 us/row)")
    for name in sorted(outside):
        print(f"  ({name:12s} {median[name]:8.1f} us/step)")


if __name__ == "__main__":
    main()

"""Cost of the engine outside the model forward: scheduler, update and step loop, with an executor that does nothing.

    python bench/engine_overhead.py [--steps 2000] [--json]

For each number of rows all requests decode; figures are medians over steps of the wall time. `step` is the whole of
EngineCore.step, `schedule` and `update` are parts of it, `rest` is the loop itself and the executor's bookkeeping.
The targets: below 300 us per step for one row, below 20 us per row and step at 64 rows. The last line is what the
policy `fair` takes of a step in which a request ends and another comes, with 256 rows and 10,000 waiting: below 1 ms.
"""

from __future__ import annotations

import argparse
import json
from concurrent.futures import Future
from statistics import median
from time import perf_counter

from lmkit.api import EngineRequest, SamplingParams, SchedLimits, StepPlan, StepResult, TokenLogprob
from lmkit.contracts.wire import RowLogprobs
from lmkit.engine.core import EngineCore
from lmkit.engine.intake import Intake
from lmkit.scheduling.scheduler import Scheduler
from lmkit_scheduler_fair.policy import Fair
from lmkit_testing.hash_model import hash_kv
from lmkit_testing.stepper import ArrivalOrder

TARGETS = {1: 300.0, 64: 20.0}  # us: per step for one row, per row and step for 64


class IdleExecutor:
    """Says the same token for every row, at once."""

    def __init__(self, depth: int, logprobs: bool) -> None:
        self.depth = depth
        self.logprobs = logprobs

    def on_failure(self, callback) -> None:
        pass

    def forward(self, plan: StepPlan) -> None:
        self.plan = plan

    def sample(self, step: int, masks) -> Future:
        future: Future = Future()
        result = StepResult(step, [[7] if row.sample else [] for row in self.plan.rows])
        if self.logprobs:
            entry = TokenLogprob(7, -0.5, 1, [(7, -0.5)])
            result.logprobs = [RowLogprobs(i, [entry]) for i in range(len(self.plan.rows))]
        future.set_result(result)
        return future


def timed(obj, name: str, spent: dict[str, float]) -> None:
    """Replace a method by one that adds its time to spent[name]."""
    method = getattr(obj, name)

    def wrapper(*args):
        start = perf_counter()
        result = method(*args)
        spent[name] += perf_counter() - start
        return result

    setattr(obj, name, wrapper)


def measure(
    rows: int, steps: int, *, depth: int = 1, prompt: int = 256, windows=(None,), logprobs: bool = False
) -> dict:
    """Median microseconds per step of each phase, over `steps` steps in which every row decodes."""
    block_size = 16
    length = prompt + steps + 32
    kv = hash_kv(rows * (length // block_size + 2) + 1, block_size, windows)
    limits = SchedLimits(max_tokens=8192, max_rows=rows, max_length=length, depth=depth, eos_token_ids=(2,))
    scheduler = Scheduler(limits, kv, ArrivalOrder())
    engine = EngineCore(scheduler, IdleExecutor(depth, logprobs), Intake(1000, length))
    params = SamplingParams(max_tokens=steps + 16, logprobs=0 if logprobs else None)
    start = perf_counter()
    for i in range(rows):
        engine.add(EngineRequest(str(i), [(i * 31 + j) % 1000 for j in range(prompt)], params, arrival=float(i)))
    add = (perf_counter() - start) / rows
    while any(r.num_output < 2 for r in scheduler.requests.values()):
        engine.step()
    spent = {"schedule": 0.0, "update": 0.0}
    timed(scheduler, "schedule", spent)
    timed(scheduler, "update", spent)
    samples = []
    for _ in range(steps):
        spent["schedule"] = spent["update"] = 0.0
        start = perf_counter()
        engine.step()
        total = perf_counter() - start
        samples.append((spent["schedule"], spent["update"], total - sum(spent.values()), total))
    schedule, update, rest, total = (median(column) * 1e6 for column in zip(*samples, strict=True))
    return {
        "rows": rows, "depth": depth, "groups": len(windows), "logprobs": logprobs,
        "schedule": schedule, "update": update, "rest": rest, "step": total, "per_row": total / rows, "add": add * 1e6,
    }  # fmt: skip


def fair(rows: int = 256, waiting: int = 10_000, steps: int = 2000) -> tuple[float, float, float]:
    """Microseconds that the policy takes of a step, median and 99th percentile, and those of the whole scheduler."""
    policy = Fair()
    spent = dict.fromkeys(("admit_key", "victim_key", "gives_way"), 0.0)
    for name in spent:
        timed(policy, name, spent)
    kv = hash_kv(rows * (rows // 8 + 1), 16, (None,))
    limits = SchedLimits(max_tokens=8192, max_rows=rows, max_length=2 * rows, max_waiting=2 * waiting)
    scheduler = Scheduler(limits, kv, policy)
    engine = EngineCore(scheduler, IdleExecutor(1, False), Intake(1000, 2 * rows))
    num = 0

    def come(tenant: str) -> None:
        nonlocal num
        num += 1
        params = SamplingParams(max_tokens=3 * rows // 4 + num % (rows // 2))  # about one ends in each step
        engine.add(EngineRequest(str(num), [num % 1000, num // 1000, 1, 2], params, arrival=float(num), tenant=tenant))

    for i in range(rows + waiting):
        come(f"heavy {i % 3}" if i % 4 else "heaviest")
    for _ in range(rows):
        engine.step()
    parts, whole = [], []
    for i in range(steps):
        spent.update(dict.fromkeys(spent, 0.0))
        begin = perf_counter()
        come("light" if i % 10 == 0 else "heaviest")
        engine.step()
        whole.append(perf_counter() - begin)
        parts.append(sum(spent.values()))
    assert min(len(scheduler.running) / rows, len(scheduler.waiting) / waiting) > 0.9
    parts.sort()
    return 1e6 * median(parts), 1e6 * parts[int(0.99 * steps)], 1e6 * median(whole)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    cases = [
        measure(1, args.steps),
        measure(8, args.steps),
        measure(64, args.steps),
        measure(64, args.steps, depth=2),
        measure(64, args.steps, windows=(None, 128)),
        measure(64, args.steps, logprobs=True),
        measure(256, args.steps // 4),
    ]
    if args.json:
        print(json.dumps(cases))
        return
    print(" rows depth groups logprobs | schedule  update   rest    step us | us/row | add us")
    for c in cases:
        print(f"{c['rows']:5}{c['depth']:6}{c['groups']:7}{c['logprobs']!s:>9} |{c['schedule']:9.1f}{c['update']:8.1f}"
              f"{c['rest']:7.1f}{c['step']:8.1f}    |{c['per_row']:7.2f} |{c['add']:7.1f}")  # fmt: skip
    one, many = cases[0]["step"], cases[2]["per_row"]
    print(f"one row: {one:.0f} us per step (target {TARGETS[1]:.0f}); "
          f"64 rows: {many:.1f} us per row and step (target {TARGETS[64]:.0f})")  # fmt: skip
    usual, slow, step = fair()
    print(f"fair, 256 rows, 10,000 waiting: {usual:.0f} us of a step, p99 {slow:.0f} (target 1,000); a step {step:.0f}")


if __name__ == "__main__":
    main()

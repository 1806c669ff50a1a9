"""What the machine can do, measured in the same run as what is compared with it.

A limit is the best rate that any case reached which does nothing but read, or nothing but multiply. Plugins add cases
of their own (`BenchmarkCase.limit`): on a machine where torch is not at the limit, a native kernel raises it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter

import torch
from lmkit.api import BenchmarkCase
from torch.nn import functional as F

READ_BYTES = 512 << 20  # far beyond every cache
SIZES = (512, 1024, 2048)  # of square matrices: the largest that takes a moment
MOMENT = 0.1  # seconds
MIN_SECONDS, MIN_RUNS, MAX_RUNS = 0.25, 5, 2000


@dataclass(slots=True)
class Limits:
    """Bytes per second read, and operations per second by dtype."""

    read: float = 0.0
    flops: dict[str, float] = field(default_factory=dict)

    def learn(self, case: BenchmarkCase, seconds: float) -> None:
        """Takes in the best time of a case that measures a limit."""
        if case.limit == "read":
            self.read = max(self.read, case.bytes / seconds)
        elif case.limit == "flops":
            self.flops[case.dtype] = max(self.flops.get(case.dtype, 0.0), case.flops / seconds)

    def bound(self, case: BenchmarkCase) -> float | None:
        """Seconds below which the case cannot fall: its bytes or its arithmetic. None when no limit applies."""
        bounds = [case.bytes / self.read] if self.read else []
        if case.flops and case.dtype in self.flops:
            bounds.append(case.flops / self.flops[case.dtype])
        return max(bounds, default=None)

    def share(self, case: BenchmarkCase, seconds: float) -> float | None:
        """The part of its limit that a case reaches: 1.0 = it cannot be faster."""
        bound = self.bound(case)
        return None if bound is None else bound / seconds


def limit_cases() -> Iterator[BenchmarkCase]:
    """What torch can measure anywhere."""
    data = torch.ones(READ_BYTES // 4)
    reads: dict[str, Callable[[], object]] = {
        "sum": data.sum,
        "max": data.amax,
        "dot": partial(torch.dot, data, data),
    }
    for name, run in reads.items():
        yield BenchmarkCase(name=f"read {READ_BYTES >> 20} MiB, {name}", run=run, bytes=data.nbytes, limit="read")
    del data, reads
    for dtype in (torch.float32, torch.bfloat16, torch.int8):
        name = str(dtype).removeprefix("torch.")
        for size in SIZES:
            a, b = torch.ones(size, size, dtype=dtype), torch.ones(size, size, dtype=dtype)
            multiply = partial(torch._int_mm if dtype is torch.int8 else F.linear, a, b)
            began = perf_counter()
            multiply()
            if perf_counter() - began > MOMENT:  # without instructions for it, eight times as long
                break
        yield BenchmarkCase(
            name=f"multiply {size}, {name}", run=multiply, bytes=3 * a.nbytes, flops=2 * size**3, dtype=name,
            limit="flops",
        )  # fmt: skip


def measure(case: BenchmarkCase) -> list[float]:
    """Seconds of each run, after one that warms up: for a quarter of a second, at least MIN_RUNS times."""
    case.run()
    samples: list[float] = []
    spent = 0.0
    while (spent < MIN_SECONDS or len(samples) < MIN_RUNS) and len(samples) < MAX_RUNS:
        began = perf_counter()
        case.run()
        samples.append(perf_counter() - began)
        spent += samples[-1]
    return samples


def read_bandwidth() -> float:
    """Bytes per second, the best of all cases that read."""
    limits = Limits()
    for case in limit_cases():
        if case.limit != "read":
            break
        limits.learn(case, min(measure(case)))
    return limits.read

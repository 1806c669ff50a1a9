"""What is measured, and how a number is made of the times an engine reports."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from lmkit_bench.workload import random_prompts
from process import EngineProcess

VOCABULARY = range(1000, 100_000)  # every shape here has these ids


@dataclass(frozen=True)
class Workload:
    """`measure(engine, seed)` returns one number; the same seed means the same prompts for every engine."""

    name: str
    title: str
    unit: str
    better: str  # "higher" or "lower"
    measure: Callable[[EngineProcess, int], float]
    max_length: int
    max_rows: int = 1


def prompts(count: int, length: int, seed: int, prefix: int = 0) -> list[list[int]]:
    made = random_prompts(count, length, 1, prefix=prefix, seed=seed, vocabulary=VOCABULARY)
    return [list(p.prompt) for p in made]  # type: ignore[arg-type]


def decode(engine: EngineProcess, seed: int, *, length: int = 32, tokens: int = 64) -> float:
    """Tokens per second of a lone request, after its first token."""
    (times,) = engine.run(prompts(1, length, seed), tokens)
    return (tokens - 1) / (times[-1] - times[0])


def batch(engine: EngineProcess, seed: int, *, rows: int = 16, length: int = 128, tokens: int = 64) -> float:
    """Output tokens per second of several requests at once, their prompts included."""
    times = engine.run(prompts(rows, length, seed), tokens)
    return rows * tokens / max(row[-1] for row in times)


def prefill(engine: EngineProcess, seed: int, *, length: int = 2048) -> float:
    """Prompt tokens per second until the first token."""
    (times,) = engine.run(prompts(1, length, seed), 1)
    return length / times[0]


def prefix(engine: EngineProcess, seed: int, *, shared: int = 2048, own: int = 32) -> float:
    """TTFT of a request as a part of that of the request before, with which it shares the first tokens."""
    first, second = prompts(2, shared + own, seed, shared)
    cold = engine.run([first], 1)[0][0]
    return engine.run([second], 1)[0][0] / cold


def context_workload(length: int) -> Workload:
    measure = partial(decode, length=length, tokens=17)
    return Workload(f"context{length}", f"decode at {length} tokens", "tok/s", "higher", measure, length + 32)


MAIN = (
    Workload("decode", "decode, batch 1 (32 in, 64 out)", "tok/s", "higher", decode, 128),
    Workload("batch16", "batch 16 (128 in, 64 out)", "tok/s", "higher", batch, 256, 16),
    Workload("prefill", "prefill 2048", "tok/s", "higher", prefill, 2112),
    Workload("prefix", "TTFT with a known prefix of 2048 / without", "", "lower", prefix, 2112),
)
CONTEXT = tuple(context_workload(length) for length in (1024, 8192, 32_000))

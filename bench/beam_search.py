"""Beam search of width 4 beside four sampled outputs of the same prompt: CPU time, positions computed, steps.

    python bench/beam_search.py [--shape qwen2-0.5b] [--prompt 64] [--tokens 32] [--rounds 8] [--profile]

Both run in turns, in one process, and never end early. The median of the rounds' ratios is told. A shape is one of
`lmkit_bench.shapes`, with random weights; without one it is the demo checkpoint.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import process_time

from lmkit import LLM, BeamSearchParams, SamplingParams
from lmkit_bench.shapes import byte_tokenizer, shaped_checkpoint

WIDTH = 4


def count(llm: LLM) -> list[int]:
    """Steps, rows and positions, counted from now on."""
    scheduler = llm._engine.core.scheduler
    plan, counts = scheduler.schedule, [0, 0, 0]

    def schedule() -> object:
        made = plan()
        for i, number in enumerate((bool(made.rows), len(made.rows), sum(row.num_tokens for row in made.rows))):
            counts[i] += number
        return made

    scheduler.schedule = schedule
    return counts


def measure(llm: LLM, args: argparse.Namespace) -> None:
    seed = iter(range(1, 1 << 30))
    counts = count(llm)

    def prompt() -> list[int]:
        number = next(seed)
        return [3 + number * (i + 7) * 131 % 200 for i in range(args.prompt)]  # another each time: nothing is cached

    params = SamplingParams(max_tokens=args.tokens, temperature=1.0, seed=1, ignore_eos=True)
    beams = BeamSearchParams(WIDTH, args.tokens, ignore_eos=True)
    ways: Sequence[tuple[str, Callable[[], object]]] = [
        ("sampled", lambda: llm.generate([prompt()], params, n=WIDTH, progress=False)),
        ("beams", lambda: llm.beam_search([prompt()], beams)),
    ]
    times: dict[str, list[float]] = {name: [] for name, _ in ways}
    for round in range(args.rounds + 1):  # the first warms up
        for name, run in ways if round % 2 else reversed(ways):
            before, began = counts[:], process_time()
            run()
            times[name].append(process_time() - began)
            if not round:
                print(name, dict(zip(("steps", "rows", "positions"), map(int.__sub__, counts, before), strict=True)))
                times[name].clear()
    for name in times:
        print(f"{name:8} {median(times[name]) * 1000 / args.tokens:8.3f} ms of CPU per token of each output")
    ratios = [b / s for b, s in zip(times["beams"], times["sampled"], strict=True)]
    print(f"beams / sampled: median {median(ratios):.2f}, from {min(ratios):.2f} to {max(ratios):.2f}")
    if args.profile:
        with cProfile.Profile() as profile:
            for _ in range(args.rounds):
                ways[1][1]()
        pstats.Stats(profile).sort_stats("tottime").print_stats(30)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape")
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--profile", action="store_true")
    args = parser.parse_args()
    with ExitStack() as stack:
        name = "demo"
        if args.shape:
            folder = Path(stack.enter_context(TemporaryDirectory()))
            shaped_checkpoint(args.shape, folder)
            byte_tokenizer(folder)
            name = str(folder)
        measure(stack.enter_context(LLM(name, kv_memory="256MiB", max_rows=16, max_length=2048)), args)


if __name__ == "__main__":
    main()

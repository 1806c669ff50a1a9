"""Greedy decoding of mixtures of experts on the CPU, lmkit beside `transformers`: same checkpoint, threads, process.

    python bench/moe_speed.py [--shape mixtral-0.8b] [--shape qwen3-moe-0.7b] [--rows 8] [--tokens 24] [--rounds 5]

The two alternate round by round; every round gives a ratio. transformers runs a bare loop of forward passes with its
cache, once for each of `--experts`, the ways it has to run experts. (batched_mm copies the weights of every choice: the
prompts of mixtral-0.8b take it minutes, so it runs only when it is named.) Prints tokens per second of all rows
together, and the median and the spread of the ratios. Random weights: what experts the tokens choose is as uneven as
chance. `--checkpoints` is where they are kept for the next time.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from time import perf_counter

import torch
from lmkit.api import EngineRequest, SamplingParams
from lmkit.config import EngineConfig, ModelConfig, ParallelConfig, SchedConfig
from lmkit.engine.build import build_engine
from lmkit.plugins.resolve import resolve
from lmkit_bench.shapes import shaped_checkpoint

Run = Callable[[list[list[int]], int], float]  # prompts, tokens -> decoded tokens per second
SHAPES = ("mixtral-0.8b", "qwen3-moe-0.7b")


def lmkit_run(directory: Path, threads: int, max_length: int, rows: int) -> Run:
    """Steps of an in-process engine, from the first in which every row decodes."""
    config = EngineConfig(
        model=ModelConfig(model=str(directory), max_length=max_length),
        parallel=ParallelConfig(threads=threads),
        sched=SchedConfig(max_rows=rows),
    )
    core = build_engine(config, *resolve(config)[:2]).core
    numbers = iter(range(1 << 30))

    def run(prompts: list[list[int]], tokens: int) -> float:
        params = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)
        for ids in prompts:
            core.add(EngineRequest(f"r{next(numbers)}", ids, params))
        left, seconds, decoded = tokens * len(prompts), 0.0, 0
        while core.has_work():
            began = perf_counter()
            made = sum(len(event.tokens) for event in core.step())
            if left <= (tokens - 1) * len(prompts) and made == len(prompts):
                seconds, decoded = seconds + perf_counter() - began, decoded + made
            left -= made
        assert left == 0
        return decoded / seconds

    return run


def transformers_run(directory: Path, experts: str) -> Run:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        directory, dtype="auto", attn_implementation="sdpa", experts_implementation=experts
    ).eval()

    @torch.inference_mode()
    def run(prompts: list[list[int]], tokens: int) -> float:
        out = model(torch.tensor(prompts), use_cache=True)
        began = perf_counter()
        for _ in range(tokens - 1):
            ids = out.logits[:, -1:].argmax(-1)
            out = model(ids, past_key_values=out.past_key_values, use_cache=True)
        return (tokens - 1) * len(prompts) / (perf_counter() - began)

    return run


def measure(shape: str, args: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(args.checkpoints or scratch) / shape
        if not (directory / "config.json").exists():
            shaped_checkpoint(shape, directory)
        runs = {"lmkit": lmkit_run(directory, args.threads, args.prompt + args.tokens, args.rows)}
        runs |= {f"transformers {experts}": transformers_run(directory, experts) for experts in args.experts}
        found: dict[str, list[float]] = {name: [] for name in runs}
        for round in range(args.rounds + 1):
            numbers = torch.Generator().manual_seed(round)
            prompts = torch.randint(10, 30000, (args.rows, args.prompt), generator=numbers).tolist()
            for name, run in runs.items():
                speed = run(prompts, args.tokens)
                if round:  # the first warms up
                    found[name].append(speed)
    print(f"{shape}, {args.rows} rows, {args.threads} threads")
    for name, speeds in found.items():
        ratios = [mine / theirs for mine, theirs in zip(found["lmkit"], speeds, strict=True)]
        print(
            f"  {name:24s} {statistics.median(speeds):8.1f} tokens/s   lmkit is {statistics.median(ratios):.2f} times "
            f"as fast ({min(ratios):.2f} to {max(ratios):.2f})"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", action="append")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--prompt", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--experts", nargs="+", default=["grouped_mm", "eager"])
    parser.add_argument("--checkpoints", help="a folder")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    for shape in args.shape or SHAPES:
        measure(shape, args)


if __name__ == "__main__":
    main()

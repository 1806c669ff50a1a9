"""Greedy decoding, lmkit against `transformers` generate with its static cache: same checkpoint, batch 1, same threads.

    python bench/decode_speed.py [--shape qwen2-0.5b] [--tokens 64] [--rounds 5] [--threads N] [--cpu-time]

With --cpu-time processor time is counted instead: with one thread on a busy machine the fairer clock. The two alternate
round by round, so that a busy machine slows both. Prints the median milliseconds per decoded token of each (prefill
excluded), and checks that both produce the number of tokens asked for.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from lmkit.api import EngineRequest, SamplingParams
from lmkit.config import EngineConfig, ModelConfig, ParallelConfig
from lmkit.engine.build import build_engine
from lmkit.plugins.resolve import resolve
from lmkit_bench.shapes import shaped_checkpoint

Run = Callable[[list[int], int], list[float]]  # prompt, tokens -> seconds at which each token was there


def lmkit_run(directory: Path, threads: int, max_length: int, clock: Callable[[], float]) -> Run:
    """Steps of an in-process engine."""
    config = EngineConfig(
        model=ModelConfig(model=str(directory), max_length=max_length), parallel=ParallelConfig(threads=threads)
    )
    core = build_engine(config, *resolve(config)[:2]).core
    numbers = iter(range(1 << 30))

    def run(prompt: list[int], tokens: int) -> list[float]:
        params = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)
        core.add(EngineRequest(f"r{next(numbers)}", prompt, params))
        times = []
        while core.has_work():
            times += [clock()] * sum(len(event.tokens) for event in core.step())
        return times

    return run


def transformers_run(directory: Path, max_length: int, clock: Callable[[], float]) -> Run:
    """generate() with cache_implementation="static", each token seen by a streamer."""
    from transformers import AutoModelForCausalLM
    from transformers.generation.streamers import BaseStreamer

    model = AutoModelForCausalLM.from_pretrained(directory, dtype="auto")
    model.eval()

    class Clock(BaseStreamer):
        def __init__(self) -> None:
            self.times: list[float] = []

        def put(self, value: torch.Tensor) -> None:
            self.times.append(clock())

        def end(self) -> None:
            self.times = self.times[1:]  # the first put is the prompt

    def run(prompt: list[int], tokens: int) -> list[float]:
        streamer = Clock()
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False,
                cache_implementation="static", disable_compile=True, streamer=streamer,
            )  # fmt: skip
        return streamer.times

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen2-0.5b")
    parser.add_argument("--directory", type=Path, help="an existing checkpoint instead of a random one")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--cpu-time", action="store_true", help="count processor time, not wall-clock time")
    args = parser.parse_args()
    clock = time.process_time if args.cpu_time else time.perf_counter
    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory() as scratch:
        directory = args.directory or shaped_checkpoint(args.shape, Path(scratch) / "model")
        length = args.prompt + args.tokens
        runs = {
            "lmkit": lmkit_run(directory, args.threads, length, clock),
            "transformers": transformers_run(directory, length, clock),
        }
        found: dict[str, list[float]] = {name: [] for name in runs}
        for round in range(args.rounds + 1):
            for name, run in runs.items():
                prompt = [10 + (7 * i + round) % 50 for i in range(args.prompt)]
                times = run(prompt, args.tokens)
                assert len(times) == args.tokens, f"{name}: {len(times)} tokens"
                if round:  # the first round warms up
                    found[name].append((times[-1] - times[0]) / (len(times) - 1) * 1e3)
    for name, values in found.items():
        print(f"{name:14s} {statistics.median(values):8.2f} ms/token (rounds {', '.join(f'{v:.1f}' for v in values)})")
    ratio = statistics.median(found["transformers"]) / statistics.median(found["lmkit"])
    print(f"lmkit is {ratio:.2f} times as fast, {args.threads} threads, {args.shape}")


if __name__ == "__main__":
    main()

"""A long prefix from outside the cache against computing it: time to the first token.

    python bench/kv.py [--rounds 5] [--prefix 2048] [--shape qwen2-0.5b | --shape demo]

One engine whose cache holds one such prompt. By turns: a prompt that was never seen, so that the one before is evicted
to the host and all of it is computed; and the one before, read back. Both end with 16 tokens of their own.
`bytes`: what the blocks of the prefix take.
"""

from __future__ import annotations

import argparse
import random
import tempfile
from pathlib import Path
from statistics import median
from time import perf_counter, sleep

from lmkit.api import EngineRequest, SamplingParams
from lmkit.config import CacheConfig, EngineConfig, ModelConfig, ParallelConfig, SchedConfig
from lmkit.engine.build import build_engine
from lmkit.engine.core import EngineCore
from lmkit.plugins.resolve import resolve
from lmkit_bench.shapes import shaped_checkpoint

TARGET = 5.0  # times


def first_token(core: EngineCore, name: str, prompt: list[int]) -> tuple[float, int]:
    """Seconds until the first token, and how many of the prompt were not computed."""
    began = perf_counter()
    core.add(EngineRequest(name, prompt, SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)))
    seconds, cached = 0.0, 0
    while core.has_work():
        for event in core.step():
            seconds, cached = perf_counter() - began, event.num_cached or 0
        if core.blocked:
            sleep(0.001)  # as the engine's loop does
    return seconds, cached


def measure(model: str, prefix: int, rounds: int, connector: str, options: dict[str, object]) -> dict[str, float]:
    """Median seconds of both, by turns."""
    size, vocab = 32, 1000
    config = EngineConfig(
        model=ModelConfig(model=model, max_length=prefix + 64),
        cache=CacheConfig(num_blocks=(prefix + 64) // size + 3, block_size=size),
        sched=SchedConfig(max_tokens=512, max_rows=4),
        parallel=ParallelConfig(threads=2),
        wanted={"kv_connector": connector},
        plugins={f"kv_connector.{connector}": options},
    )
    engine = build_engine(config, *resolve(config)[:2])
    numbers = random.Random(1)

    def prompt() -> list[int]:
        return [numbers.randrange(10, vocab) for _ in range(prefix)]

    found: dict[str, list[float]] = {"computed": [], "read back": []}
    last = prompt()
    first_token(engine.core, "warm", last)
    for number in range(rounds):
        fresh = prompt()
        for name, asked in (("computed", fresh), ("read back", last)):
            tail = [numbers.randrange(10, vocab) for _ in range(16)]
            seconds, cached = first_token(engine.core, f"{name} {number}", asked + tail)
            assert cached == (prefix // size * size if name == "read back" else 0), (name, cached)
            found[name].append(seconds)
        last = fresh
    engine.close()
    spec = engine.facts.kv_bytes / (config.cache.num_blocks or 1) * (prefix // size)
    return {name: median(values) for name, values in found.items()} | {"bytes": spec}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prefix", type=int, default=2048)
    parser.add_argument("--shape", default="qwen2-0.5b", help="a shape of lmkit_bench with random weights, or demo")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = args.shape
        if model != "demo":
            model = str(shaped_checkpoint(args.shape, Path(folder) / "model"))
        ways: list[tuple[str, str, dict[str, object]]] = [
            ("memory", "offload", {"host": 4096}),
            ("disk", "offload", {"host": 1, "folder": str(Path(folder) / "disk")}),
            ("files", "shared", {"folder": str(Path(folder) / "files")}),
        ]
        for name, connector, options in ways:
            found = measure(model, args.prefix, args.rounds, connector, options)
            computed, read = found["computed"], found["read back"]
            print(
                f"{name:8} computed {computed * 1e3:8.1f} ms, read back {read * 1e3:7.1f} ms: {computed / read:5.1f}x "
                f"({found['bytes'] / 2**20:.1f} MiB)   (target >= {TARGET:g}x)",
                flush=True,
            )


if __name__ == "__main__":
    main()

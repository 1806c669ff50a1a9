"""Where a decode step on the CPU goes: native operators by name, and what is not native.

    python bench/decode_parts.py [--shape qwen2-0.5b] [--quantization int4] [--rows 1] [--prompt 32] [--rounds 4]

Half of the rounds run each tape as it is, and give `step` and `not native`; in the others its operators run one by
one, and give a line for each name. Medians over steps. Another version of the packages in front of PYTHONPATH can be
measured in turn with this one.
"""

from __future__ import annotations

import argparse
import tempfile
from collections import defaultdict
from pathlib import Path
from statistics import median
from time import perf_counter

from lmkit.api import EngineRequest, SamplingParams
from lmkit.config import EngineConfig, ModelConfig
from lmkit.engine.build import build_engine
from lmkit.plugins.resolve import resolve
from lmkit_bench.shapes import shaped_checkpoint
from lmkit_platform_cpu import native

TOKENS, WARM = 64, 8  # of each request; steps that do not count


class Watch:
    """Times what the native library runs from now on."""

    def __init__(self) -> None:
        self.apart = False  # tapes operator by operator
        self.seconds: dict[str, float] = defaultdict(float)  # of the step so far, by operator
        self.tapes: dict[native.Tape, list[tuple[str, native.Tape]]] = {}  # one of each operator
        run_tape, run_op = native.Tape.run, native.Native.run

        def tape(own: native.Tape) -> None:
            for name, part in self.operators(own) if self.apart else [("tapes", own)]:
                begin = perf_counter()
                run_tape(part)
                self.seconds[name] += perf_counter() - begin

        def operator(own: native.Native, name: str, args: native.Args, chunks: int = 0) -> None:
            begin = perf_counter()
            run_op(own, name, args, chunks)
            if not own.capturing:
                self.seconds[name] += perf_counter() - begin

        native.Tape.run, native.Native.run = tape, operator  # type: ignore[method-assign]

    def operators(self, tape: native.Tape) -> list[tuple[str, native.Tape]]:
        if tape not in self.tapes:
            self.tapes[tape] = []
            for op, args, chunks in tape._steps:
                alone = native.Tape(tape._library)
                alone.add(op, args, chunks)
                self.tapes[tape].append((op.name.decode(), alone))
        return self.tapes[tape]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen2-0.5b")
    parser.add_argument("--quantization", help="as of `lmkit serve`; default: none")
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--prompt", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=4)
    args = parser.parse_args()
    watch, steps, parts = Watch(), [], defaultdict(list)
    params = SamplingParams(max_tokens=TOKENS, temperature=0, ignore_eos=True)
    with tempfile.TemporaryDirectory() as folder:
        shaped_checkpoint(args.shape, Path(folder))
        wanted = {"quantization": args.quantization} if args.quantization else {}
        config = EngineConfig(ModelConfig(folder, max_length=args.prompt + TOKENS), wanted=wanted)
        core = build_engine(config, *resolve(config)[:2]).core
        for i in range(args.rounds + 1):
            watch.apart = i % 2 == 0
            for r in range(args.rows):
                prompt = [(7 * j + r) % 1000 + 5 for j in range(args.prompt)]
                core.add(EngineRequest(f"{i} {r}", prompt, params))
            for step in range(TOKENS):
                watch.seconds.clear()
                begin = perf_counter()
                core.step()
                whole = perf_counter() - begin
                if i and step >= WARM:
                    if not watch.apart:
                        steps.append((whole, whole - sum(watch.seconds.values())))
                    else:
                        for name, seconds in watch.seconds.items():
                            parts[name].append(seconds)
            while core.has_work():
                core.step()
    for name, column in zip(("step", "not native"), zip(*steps, strict=True), strict=True):
        print(f"{name:16} {1e3 * median(column):8.3f} ms")
    for name, seconds in sorted(parts.items(), key=lambda item: -median(item[1])):
        print(f"  {name:14} {1e3 * median(seconds):8.3f} ms")


if __name__ == "__main__":
    main()

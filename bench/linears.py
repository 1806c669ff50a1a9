"""The CPU's linears alone: milliseconds and GB/s of weights for all of a model's, kind by kind and rows by rows.

    python bench/linears.py [--kinds bf16,compact,int8,w8a8,int4] [--rows 1,16,64,128,512] [--rounds 5]
                            [--isa amx] [--layers 24]

The weights are those of a Qwen2-0.5B, each layer's its own, so that none is found in a cache. Another version of the
package in front of PYTHONPATH can be measured in turn with this one.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from lmkit_platform_cpu import benchmarks, integer, packed
from lmkit_platform_cpu.native import Native, load
from torch import Tensor

LAYER = ((1152, 896), (896, 896), (9728, 896), (896, 4864))  # outputs and inputs
HEAD = (151_936, 896)
INTEGERS = {"int8": (8, 0, 2, "symmetric"), "w8a8": (8, 0, 1, "symmetric"), "int4": (4, 64, 1, "range")}
Weight = packed.Packed | integer.PackedIntegers


def weights(native: Native, kind: str, layers: int) -> list[Weight]:
    made: list[Weight] = []
    for i, (n, k) in enumerate((*LAYER, HEAD)):
        source = torch.randn(n, k, generator=torch.Generator().manual_seed(i)).mul_(0.02).bfloat16()
        for _ in range(layers if i < len(LAYER) else 1):
            if kind in INTEGERS:
                made.append(integer.round_and_pack(native, source, *INTEGERS[kind]))
            elif kind == "compact":
                compact = packed.pack_compact(native, source, torch.bfloat16)
                assert compact is not None
                made.append(compact)
            else:
                made.append(packed.pack(native, source, torch.bfloat16))
    return made


def measure(native: Native, own: list[Weight], rows: int) -> float:
    """Seconds of all layers for `rows` rows, and of the head for one in sixteen of them, as a prompt's last."""
    xs = {k: torch.randn(rows, k).bfloat16() for k in {weight.k for weight in own}}
    few = {k: x[: max(1, rows // 16) if rows > 64 else rows] for k, x in xs.items()}
    begin = time.perf_counter()
    for weight in own:
        x: Tensor = (few if weight.n == HEAD[0] else xs)[weight.k]
        if isinstance(weight, packed.Packed):
            packed.linear(native, x, weight)
        else:
            integer.linear(native, x, weight)
    return time.perf_counter() - begin


def limit(native: Native) -> float:
    """Bytes a second that all threads read."""
    case = next(benchmarks.cases())
    times = []
    for _ in range(5):
        begin = time.perf_counter()
        case.run()
        times.append(time.perf_counter() - begin)
    return case.bytes / min(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", default="bf16,compact,int8,w8a8,int4")
    parser.add_argument("--rows", default="1,16,64,128,512")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--isa", default="auto")
    args = parser.parse_args()
    native = load()
    assert native is not None, "the native kernels were not built"
    native.start(args.threads)
    native.set_isa(args.isa)
    print(f"{native.isa}: reads {limit(native) / 1e9:.1f} GB/s", flush=True)
    kinds = {kind: weights(native, kind, args.layers) for kind in args.kinds.split(",")}
    for rows in map(int, args.rows.split(",")):
        found: dict[str, list[float]] = {kind: [] for kind in kinds}
        for _ in range(args.rounds):
            for kind, own in kinds.items():
                found[kind].append(measure(native, own, rows))
        for kind, own in kinds.items():
            size, t = sum(weight.nbytes for weight in own), statistics.median(found[kind])
            shown = f"{t * 1e3:9.2f} ms {size / t / 1e9:7.1f} GB/s (best {min(found[kind]) * 1e3:.2f})"
            print(f"{rows:4} rows  {kind:8} {shown}", flush=True)
    print(f"{native.isa}: reads {limit(native) / 1e9:.1f} GB/s", flush=True)


if __name__ == "__main__":
    main()

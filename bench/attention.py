"""Attention of the CPU alone, on each instruction set named: prompts in GFLOP/s, decoding in GB/s of keys and values.

    python bench/attention.py [--isas avx512_bf16 amx] [--threads 2] [--blocks 16] [CASE ...]

A case is SHAPE-KV-ROWSxLENGTH, with `p` behind it for prompts: qwen-bfloat16-1x2048p. Blocks lie scattered. Times are
medians of a second of each; torch's product of 2048 x 2048 matrices in bfloat16 (oneDNN) and its sum of 512 MiB are
measured before and after them. Causal prompts count as half of the square.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from lmkit.api import AttnNeed
from lmkit_attention_cpu.backend import CpuAttention
from lmkit_bench.pages import PlainPlatform
from lmkit_platform_cpu.native import Native, load
from lmkit_testing.attention import Rows

SHAPES = {"qwen": (14, 2, 64), "llama": (32, 8, 128)}  # query heads, KV heads, dimensions
CASES = [
    *("qwen-bfloat16-1x2048p", "llama-bfloat16-1x2048p", "qwen-bfloat16-1x8192p", "qwen-int8-1x2048p"),
    *("qwen-bfloat16-1x8192", "qwen-bfloat16-8x8192", "qwen-bfloat16-1x32768", "qwen-int8-8x8192"),
    *("llama-bfloat16-1x8192", "llama-int8-1x8192"),
]


class NativePlatform(PlainPlatform):
    def __init__(self, native: Native) -> None:
        super().__init__()
        self.native = native


def median(call: Callable[[], object], seconds: float = 1.0) -> float:
    call()
    times: list[float] = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times) < 3:
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def limits() -> None:
    a, b, long = torch.randn(2048, 2048).bfloat16(), torch.randn(2048, 2048).bfloat16(), torch.zeros(1 << 27)
    products, read = 2 * 2048**3 / median(lambda: a @ b), long.nbytes / median(long.sum)
    print(f"limits: {products / 1e9:.0f} GFLOP/s, {read / 1e9:.1f} GB/s", flush=True)


def run(native: Native, case: str, isas: list[str], block: int) -> None:
    shape, kv_dtype, size = case.split("-")
    heads, kv_heads, dim = SHAPES[shape]
    count, length = map(int, size.rstrip("p").split("x"))
    need = AttnNeed(dim, heads, kv_heads, "bfloat16", kv_dtype, block)
    rows = Rows(CpuAttention(), need, num_rows=count, platform=NativePlatform(native), length=length + block)
    for fresh in [length] if size.endswith("p") else [length - 1, 1]:
        plan = rows.planner.plan(rows.paged.grow([(row, fresh) for row in range(count)]))
        k, v = (torch.randn(count * fresh, kv_heads, dim).bfloat16() for _ in "kv")
        rows.backend.write_kv(k, v, rows.kv, plan.slots)
    q = torch.randn(count * fresh, heads, dim).bfloat16()
    out = torch.empty_like(q)
    for isa in isas:
        native.set_isa(isa)
        seconds = median(lambda: rows.backend.forward(q, rows.kv, plan, dim**-0.5, out))
        if fresh > 1:
            rate = f"{count * 2 * heads * dim * length**2 / seconds / 1e9:8.0f} GFLOP/s"
        else:
            rate = f"{rows.kv[0].nbytes / block * count * length / seconds / 1e9:8.1f} GB/s"
        print(f"{case:24} {isa:12} {seconds * 1e3:9.3f} ms {rate}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("cases", nargs="*", default=CASES)
    parser.add_argument("--isas", nargs="+", default=["avx512_bf16", "amx"])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--blocks", type=int, default=16)
    options = parser.parse_args()
    native = load()
    assert native is not None, "the native kernels were not built"
    native.start(options.threads)
    torch.set_num_threads(options.threads)
    limits()
    for case in options.cases:
        run(native, case, options.isas, options.blocks)
    limits()


if __name__ == "__main__":
    main()

"""Kernels alone: attention of each backend beside the others, and linears by format, on the shapes of the 8B model.

Memory is gone through in turn, so that no cache holds what is read; a graph runs the calls, so that the host does not
count.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from linears import FORMATS, kernels
from lmkit.api import AttnNeed, SelectionError, StepLimits
from lmkit.plugins import load_target
from lmkit.plugins.host import PluginHost
from lmkit_bench.pages import PagedRows
from machine import Machine
from report import Report

NEED = AttnNeed(128, 32, 8, "bfloat16", "bfloat16", 16)
STEPS = ((1, 1024, 1), (1, 32768, 1), (64, 1024, 1), (256, 1024, 1), (256, 2048, 1), (1, 8192, 8192))
SMALL_STEPS = ((1, 40, 1), (3, 20, 1), (1, 33, 33))  # rows, length of each, new tokens of each
LAYERS = ((4096, 6144), (4096, 28672), (14336, 4096))  # in, out
ROWS = (1, 8, 16, 64)
ROTATED = 512 << 20  # bytes


def measure(machine: Machine, report: Report, seconds: float) -> None:
    platform = machine.bind()
    with torch.inference_mode():
        for rows, length, fresh in SMALL_STEPS if machine.small else STEPS:
            taken: dict[str, float] = {}
            for name in machine.offered("attention"):
                case = f"attention {name} {rows}x{length}" + (" prompt" if fresh > 1 else "")
                if name == "torch" and rows * length > 100_000:
                    continue  # the reference copies what it reads
                with report.trying(case):
                    attention(machine, report, platform, case, name, rows, length, fresh, taken)
            said = ", ".join(f"{name} {1e6 * seconds:,.0f} us" for name, seconds in taken.items())
            report.add(f"attention {rows}x{length}" + (" prompt" if fresh > 1 else ""), said, row=True)
        for form in FORMATS:
            for size, out in ((128, 256),) if machine.small else LAYERS:
                with report.trying(f"linear {form} {size}->{out}"):
                    linears(machine, report, form, size, out)


def attention(
    machine: Machine, report: Report, platform: Any, case: str, name: str, rows: int, length: int, fresh: int,
    taken: dict[str, float],
) -> None:  # fmt: skip
    """`rows` rows of `length` tokens, of which the last `fresh` are new."""
    backend = load_target(PluginHost().load("attention", name).target)()
    need = NEED if not machine.small else replace(NEED, head_dim=32, num_q_heads=4, num_kv_heads=2)
    if reason := backend.can_run(need, machine.info):
        report.add(case, reason)
        return
    blocks = rows * -(-length // need.block_size) + 1
    paged = PagedRows(rows, blocks, need.block_size)
    if length > fresh:
        paged.grow([(row, length - fresh) for row in range(rows)])
    planner = backend.planner(need, StepLimits(rows, rows * fresh, blocks, length), platform)
    plan = planner.plan(paged.grow([(row, fresh) for row in range(rows)], machine.device))
    kind = {"device": machine.device, "dtype": torch.bfloat16}
    size = rows * length * need.num_kv_heads * need.head_dim * 4
    shape = backend.kv_shape(need, blocks)
    memories = [torch.randn(shape, **kind) for _ in range(copies(machine, size, 8))]
    q = torch.randn(rows * fresh, need.num_q_heads, need.head_dim, **kind)
    out = torch.empty_like(q)
    calls = [partial(backend.forward, q, kv, plan, need.head_dim**-0.5, out) for kv in memories]
    taken[name], captured = machine.seconds(calls)
    pairs = rows * sum(range(length - fresh + 1, length + 1))
    tflops = 4 * pairs * need.num_q_heads * need.head_dim / taken[name] / 1e12
    gb_s = size / taken[name] / 1e9
    report.add(case, taken[name] * 1e6, "us", gb_s=gb_s, tflops=tflops, captured=captured)


def linears(machine: Machine, report: Report, form: str, size: int, out: int) -> None:
    """The preferred kernel of a format, by rows: bytes of the packed weight and of what goes in and out."""
    try:
        made = kernels(machine, form, size, out)
    except SelectionError as e:
        if "op" not in FORMATS[form][0]:
            raise
        report.add(f"linear {form} {size}->{out}", e.message)  # a named one that this machine refuses
        return
    if not made:
        report.add(f"linear {form}", "no kernel")
        return
    kernel = made[0].kernel
    first, _ = made[0].packed()
    weights = [first, *(made[0].packed()[0] for _ in range(copies(machine, first.nbytes, 16) - 1))]
    bits, bandwidth, shares = 8 * first.nbytes / (size * out), report.value("bandwidth"), []
    for rows in ROWS:
        x = torch.randn(rows, size, device=machine.device).bfloat16()
        calls: list[Callable[[], object]] = [partial(kernel.apply, x, weight, None) for weight in weights]
        taken, captured = machine.seconds(calls)
        rate = (first.nbytes + 2 * rows * (size + out)) / taken / 1e9
        case = f"linear {form} {rows}x{size}->{out}"
        report.add(case, taken * 1e6, "us", gb_s=rate, bits=bits, captured=captured, kernel=kernel.name)
        if bandwidth:
            shares.append(f"{100 * rate / bandwidth:.0f}")
    said = f"{kernel.name}, {bits:.1f} bits a weight; {', '.join(map(str, ROWS))} rows, of the bandwidth"
    report.add(f"linear {form} {size}->{out}", f"{' / '.join(shares)} %", row=True, said=said)


def copies(machine: Machine, size: int, most: int) -> int:
    """So many of `size` bytes are read in turn."""
    return 2 if machine.small else min(most, max(2, ROTATED // size))

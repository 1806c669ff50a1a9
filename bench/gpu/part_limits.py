"""What the device can do, and which plugins run there. All shares are of its copies and products of matrices."""

from __future__ import annotations

import platform
from functools import partial

import torch
from machine import Machine
from report import Report

COPIED = 4 << 30  # bytes, far beyond every cache
SIDE = 8192  # of the matrices


def measure(machine: Machine, report: Report, seconds: float) -> None:
    report.add("device", torch.cuda.get_device_name(0) if machine.kind != "cpu" else platform.processor() or "cpu")
    report.add("torch", torch.__version__)
    with report.trying("memory"):
        report.add("memory", machine.info.total_memory / 2**30, "GiB", capability=str(machine.info.capability))
    for kind, component in (("attention", None), ("op", "rowwise")):
        with report.trying(f"selection of {kind}"):
            said = f"refused: {machine.refused(kind, component)}"
            report.add(
                f"selection of {component or kind}", ", ".join(machine.offered(kind, component)), row=True, said=said
            )
    count = (COPIED if not machine.small else 8 << 20) // 2
    with report.trying("copy"):
        source = torch.empty(count, dtype=torch.bfloat16, device=machine.device).normal_()
        target = torch.empty_like(source)
        taken, _ = machine.seconds([partial(target.copy_, source)] * 3)
        copied = 2 * source.nbytes / taken / 1e9
        report.add("copy", copied, "GB/s", counted="read and written")
        whole = source.view(torch.float32)
        taken, _ = machine.seconds([whole.sum] * 3)
        read = source.nbytes / taken / 1e9
        report.add("read", read, "GB/s")
        report.add("bandwidth", max(copied, read), "GB/s", said="the larger of both")
    side = SIDE if not machine.small else 256
    with report.trying("gemm"):
        a, b = (torch.randn(side, side, device=machine.device).bfloat16() for _ in range(2))
        taken, _ = machine.seconds([partial(torch.matmul, a, b)] * 4)
        report.add("gemm", 2 * side**3 / taken / 1e12, "TFLOP/s", side=side)

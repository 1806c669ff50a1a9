"""A model of 0.6B parameters, decoding one row: what a step costs beside its kernels shows here first."""

from __future__ import annotations

from engine import opened
from machine import Machine
from part_large import decode
from report import Report


def measure(machine: Machine, report: Report, seconds: float) -> None:
    folder = machine.folder("0.6b")
    options = {"max_length": 1024, "max_rows": 8}
    if machine.small:
        options |= {"max_length": 128, "num_blocks": 64, "max_step_tokens": 128, "block_size": 16}
    with opened(machine.config(folder, **options)) as engine:
        decode(engine, folder, report, "0.6b", 256 if not machine.small else 8)

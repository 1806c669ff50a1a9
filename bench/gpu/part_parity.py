"""Greedy tokens of a small model: those of the CPU's reference, whatever the attention, the dtype and the steps in
flight."""

from __future__ import annotations

import random
from typing import Any

from engine import opened, prompts
from lmkit.config import from_options
from machine import Machine
from report import Report

LENGTHS = (1, 5, 33, 64, 200, 700, 3, 17, 90, 31, 250)  # of prompts: eleven rows, which a graph fills up
TOKENS = 48
CLOSE = 0.5  # share of bfloat16's tokens before the first that differs: two of random weights are soon equally likely


def measure(machine: Machine, report: Report, seconds: float) -> None:
    folder = machine.folder("tiny")
    asked = [prompts(1, n, 512, seed=n)[0] for n in LENGTHS]
    random.Random(0).shuffle(asked)

    def tokens(**options: Any) -> list[list[int]]:
        settings = {"max_length": 1024, "max_rows": 16, "max_step_tokens": 256, "num_blocks": 512, "block_size": 16}
        known = {"model": str(folder), "loader": "dummy", "platform": machine.platform}
        with opened(from_options({**known, **settings, **options})) as engine:
            return engine.play(asked, TOKENS).tokens

    wanted = {dtype: tokens(platform="cpu", attention="torch", dtype=dtype) for dtype in ("float32", "bfloat16")}
    for name in machine.offered("attention"):
        for dtype in wanted:
            for depth in (1,) if machine.kind == "cpu" else (1, 2):
                case = f"parity: {name}, {dtype}, depth {depth}"
                with report.trying(case):
                    found = tokens(attention=name, dtype=dtype, depth=depth)
                    share = same(found, wanted[dtype])
                    report.add(case, share, "share", row=True, said="tokens before the first that differs")
                    if share < (1 if dtype == "float32" else CLOSE):
                        report.fail(case, f"only {100 * share:.0f} % of the tokens are the CPU's")


def same(found: list[list[int]], wanted: list[list[int]]) -> float:
    """The share of tokens before the first difference of each row."""
    equal = 0
    for a, b in zip(found, wanted, strict=True):
        equal += next((i for i, pair in enumerate(zip(a, b, strict=True)) if pair[0] != pair[1]), len(b))
    return equal / sum(map(len, wanted))

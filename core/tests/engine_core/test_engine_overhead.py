"""The promises of bench/engine_overhead.py, with the margin that they have."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[3] / "bench" / "engine_overhead.py"


@pytest.mark.parametrize(("rows", "quantity"), [(1, "step"), (64, "per_row")])
def test_overhead_is_within_its_target(rows, quantity):
    bench = runpy.run_path(str(BENCH))
    best = min(bench["measure"](rows, 30, prompt=40)[quantity] for _ in range(3))
    assert best < bench["TARGETS"][rows]

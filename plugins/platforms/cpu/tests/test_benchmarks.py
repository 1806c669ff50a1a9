"""The yardsticks: they do the work that they claim."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from lmkit_platform_cpu.benchmarks import CHUNKS, DTYPES, LANES, MultiplyArgs, cases, multiplications
from lmkit_platform_cpu.native import Native, load

LIBRARY = load()
pytestmark = pytest.mark.skipif(LIBRARY is None, reason="the native library is not built here")
ISAS = LIBRARY.isas if LIBRARY is not None else ()
CHAINS = 12  # as in csrc/basic.inc
FLOPS = {"float32": 2, "bfloat16": 4, "int8": 8}  # of a lane


@pytest.fixture
def native() -> Iterator[Native]:
    assert LIBRARY is not None
    yield LIBRARY
    LIBRARY.set_isa("auto")


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", DTYPES)
def test_multiplications_are_counted(native: Native, isa: str, name: str) -> None:
    native.set_isa(isa)
    rounds = 100
    sums = torch.zeros(2, LANES, dtype=torch.int32 if name == "int8" else torch.float32)
    args = MultiplyArgs(sums=sums.data_ptr(), rounds=rounds, dtype=DTYPES[name])
    args.chunks[0] = 1
    native.run("multiply", args)
    lanes = int((sums != 0).sum())
    assert args.flops == rounds * CHAINS * lanes * FLOPS[name]
    assert (sums[0, :lanes] == rounds * CHAINS * FLOPS[name] // 2).all()
    assert lanes or name != "float32"


def test_limits(native: Native) -> None:
    found = list(multiplications(native))
    assert found[0].dtype == "float32"
    assert all(case.limit == "flops" and case.flops % CHUNKS == 0 for case in found)
    reading = next(iter(cases()))
    assert reading.limit == "read"
    reading.run()

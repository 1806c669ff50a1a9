"""Grammar masks in the laboratory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from hypothesis import given, settings
from hypothesis import strategies as st
from lmkit_layers.rowwise import TorchRowOps
from lmkit_op_triton import rowops
from lmkit_testing.triton_lab import lab, mutant

OPS, REFERENCE = rowops.TritonRowOps(), TorchRowOps()


def compare(rows: int, size: int, num_bytes: int, some: bool, gap: int = 0) -> None:
    made = torch.Generator().manual_seed(size)
    x = torch.randn(rows, size + gap, generator=made)
    index = torch.randperm(rows, generator=made)[: max(1, rows - 1)] if some else None
    bits = torch.randint(0, 256, (rows if index is None else len(index), num_bytes), dtype=torch.uint8, generator=made)
    wanted = x.clone()
    REFERENCE.mask(wanted[:, :size], index, bits)
    with lab(shuffle=rows) as seen:
        OPS.mask(x[:, :size], index, bits)
    assert torch.equal(x, wanted)
    assert seen.launches == 1
    assert seen.moved <= x.nbytes + bits.nbytes + 64 * rows * (2 + size // rowops.VOCABULARY)  # bits and one store


@settings(max_examples=10, deadline=None)
@given(st.integers(1, 4), st.sampled_from([1, 40, 4096, 5001]), st.booleans(), st.sampled_from([0, 3]))
def test_masks(rows: int, size: int, some: bool, gap: int) -> None:
    compare(rows, size, 4 * -(-size // 32), some, gap)


def test_tokens_beyond_the_bits_are_banned() -> None:
    compare(2, 100, 8, True)


FAULTS = {
    "order of bits": ("byte >> (i % 8)", "byte >> (7 - i % 8)"),
    "the wrong row": ("row = tl.load(rows + mine) if ROWS else mine", "row = mine"),
    "row of bits": ("bits + mine * num_bytes", "bits + row * num_bytes"),
    "beyond the row": ("== 0, size, 0)", "== 0, size + 2, 0)"),
    "what is allowed": ("% 2 == 0, size", "% 2 == 1, size"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_faults_are_found(name: str, tmp_path: Path) -> None:
    old, new = FAULTS[name]
    with mutant(rowops, old, new, tmp_path), pytest.raises(AssertionError):
        compare(3, 40, 8, True, gap=3)

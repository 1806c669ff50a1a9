"""Linears over weights as they are, of a few rows, in the laboratory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from lmkit.api import DeviceInfo, LinearSpec
from lmkit_layers.linear import PLAIN
from lmkit_op_triton import plain
from lmkit_op_triton.plain import FEW, TritonPlainLinear
from lmkit_testing import PluginConformance
from lmkit_testing.triton_lab import Seen, lab, mutant
from torch import Tensor

KERNEL = TritonPlainLinear()
CLOSE = {torch.bfloat16: 1e-2, torch.float16: 2e-3}  # of the largest value


class TestPlainLinear(PluginConformance):
    plugin = "op:plain_triton"


def made(n: int, k: int, rows: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    noise = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, k + 3, generator=noise).to(dtype)[:, :k]
    return x, torch.randn(n, k, generator=noise).to(dtype), torch.randn(n, generator=noise).to(dtype)


def check(n: int, k: int, rows: int, dtype: torch.dtype, bias: bool = True) -> Seen:
    x, weight, b = made(n, k, rows, dtype)
    layer = LinearSpec("l", k, (n,))
    assert KERNEL.can_run(PLAIN, layer, DeviceInfo("cuda", "gpu", capability=(9, 0))) is None
    packed = KERNEL.pack(PLAIN, {"weight": weight}, layer, dtype)
    with lab(unwritten=("out",), shuffle=rows) as seen:
        got = KERNEL.apply(x, packed, b if bias else None)
    want = x.double() @ weight.double().T + (b.double() if bias else 0)
    assert got.dtype == dtype
    assert float((got.double() - want).abs().max()) <= CLOSE[dtype] * max(1.0, float(want.abs().max()))
    return seen


@pytest.mark.parametrize("dtype", CLOSE, ids=str)
def test_values(dtype: torch.dtype) -> None:
    for n, k in ((20, 300), (1, 17), (33, 512)):
        for rows in (1, 2, FEW):
            check(n, k, rows, dtype, bias=rows > 1)


def test_more_rows_and_float32_are_torch_s() -> None:
    for rows, dtype in ((FEW + 1, torch.bfloat16), (0, torch.bfloat16), (2, torch.float32)):
        x, weight, bias = made(12, 40, rows, dtype)
        packed = KERNEL.pack(PLAIN, {"weight": weight}, LinearSpec("l", 40, (12,)), dtype)
        with lab() as seen:
            assert torch.equal(KERNEL.apply(x, packed, bias), torch.nn.functional.linear(x, weight, bias))
        assert seen.launches == 0


@pytest.mark.parametrize("rows", [1, 5])
def test_a_weight_is_read_once(rows: int) -> None:
    n, k = 64, 1024
    seen = check(n, k, rows, torch.bfloat16, bias=False)
    assert seen.moved <= 1.05 * 2 * (n * k + rows * (n + k))


def test_what_does_not_fit_is_refused() -> None:
    packed = KERNEL.pack(PLAIN, {"weight": torch.zeros(8, 16)}, LinearSpec("l", 16, (8,)), torch.bfloat16)
    with pytest.raises(ValueError, match="a linear of 16 to 8 values"):
        KERNEL.apply(torch.zeros(2, 24, dtype=torch.bfloat16), packed, None)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("left = i < k - start", "left = i < k"),  # reads behind a row
        ("(j < n)[:, None] & left[None, :]", "left[None, :]"),  # and behind the weight
        ("out + r[:, None] * n + j[None, :]", "out + r[:, None] + j[None, :]"),
    ],
)
def test_faults_are_found(old: str, new: str, tmp_path: Path) -> None:
    with mutant(plain, old, new, tmp_path), pytest.raises((AssertionError, Exception)):  # noqa: B017
        for rows in (1, 3):
            check(20, 300, rows, torch.bfloat16)

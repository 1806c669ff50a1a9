"""Faults put into the kernels on purpose: each is found."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

import numpy as np
from lmkit.api import DrawParams
from lmkit_layers.rowwise import TorchRowOps
from lmkit_op_triton import rowops
from lmkit_testing.triton_lab import lab, mutant

OPS, REFERENCE = rowops.TritonRowOps(), TorchRowOps()


def close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


def norms() -> None:
    x, h, weight, bias = torch.randn(3, 100), torch.randn(3, 100), torch.randn(100), torch.randn(100)
    sums = h + x
    close(OPS.rms_norm(x, weight, 1e-5, h), REFERENCE.rms_norm(sums, weight, 1e-5))
    close(h, sums)
    close(OPS.layer_norm(x, weight, bias, 1e-5), REFERENCE.layer_norm(x, weight, bias, 1e-5))


def embedding() -> None:
    weight, ids = torch.randn(9, 40), torch.tensor([3, 8])
    assert torch.equal(OPS.embed(ids, weight), weight[ids])


def gates() -> None:
    x = torch.randn(3, 70)
    for name in ("silu", "gelu", "swiglu_clamped"):
        close(OPS.gate(x, name), REFERENCE.gate(x, name))


def turning() -> None:
    for interleaved in (False, True):
        x = torch.randn(2, 5, 24)
        angles = torch.randn(2, 8).cos(), torch.randn(2, 8).sin()
        wanted = x.clone()
        REFERENCE.rotate(wanted, *angles, interleaved)
        OPS.rotate(x, *angles, interleaved)
        close(x, wanted)


def argmax() -> None:
    x = torch.randn(3, 9000).round()
    x[1, 8000] = 50
    for found, wanted in zip(OPS.argmax(x), REFERENCE.argmax(x), strict=True):
        assert torch.equal(found, wanted)


def drawing() -> None:
    # 0.9 is in the second block and far from the last token, which one that is not found becomes.
    x, share = torch.randn(5, 5000), np.array([0.05, 0.4, 0.6, 0.9, 0.999])
    for top_k, top_p in ((0, 1.0), (2, 1.0), (0, 0.01)):
        rows = [np.full(5, value, kind) for value, kind in ((0.9, "f4"), (0.0, "f4"), (top_k, "i8"), (top_p, "f4"))]
        params = DrawParams(*rows, share)
        assert torch.equal(OPS.draw(x.clone(), params)[0], REFERENCE.draw(x.clone(), params)[0])


FAULTS = {
    "mask too long": ("mask = i < size\n", "mask = i < size + 3\n", norms),
    "sum not kept": ("        tl.store(at, total, mask)\n", "", norms),
    "mean of what is not there": ("tl.where(mask, v - tl.sum(v, 0) / size, 0.0)", "v - tl.sum(v, 0) / size", norms),
    "rows overlap": ("tl.store(out + row * size + i, values", "tl.store(out + row * (size - 1) + i, values", embedding),
    "wrong half": ("x + row * x_stride + size + i", "x + row * x_stride + size - 1 + i", gates),
    "no clamp": ("first = tl.minimum(first, 7.0)", "first = first * 1.01", gates),
    "wrong sign": ("b * c + a * s", "b * c - a * s", turning),
    "neighbours": ("base + 2 * i[None, :] + 1", "base + 2 * i[None, :]", turning),
    "blocks overlap": ("at = row * tl.num_programs(1) + block", "at = row + block", argmax),
    "a block is forgotten": ("i = block * N + tl.arange(0, N)", "i = tl.arange(0, N)", argmax),
    "one token too few": ("COUNT, N) >= wanted", "COUNT, N) > wanted", drawing),
    "only the last block counts": ("        before = total\n", "", drawing),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_faults_are_found(name: str, tmp_path: Path) -> None:
    old, new, check = FAULTS[name]
    with lab():
        check()
        with mutant(rowops, old, new, tmp_path), pytest.raises(AssertionError):
            check()

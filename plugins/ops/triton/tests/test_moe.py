"""Mixtures in the laboratory: the reference's values, in bounds, no races, every output written, few bytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from hypothesis import given, settings
from hypothesis import strategies as st
from lmkit.api import DeviceInfo, LinearSpec
from lmkit_layers import LinearExperts, ReferenceLinear, TorchRowOps
from lmkit_layers.linear import PLAIN
from lmkit_op_triton import moe
from lmkit_op_triton.moe import TritonExperts
from lmkit_testing import PluginConformance
from lmkit_testing.triton_lab import Seen, lab
from torch import Tensor

KERNEL, ROWS = TritonExperts(), TorchRowOps()
# Of the largest value. The activations between are rounded once where the reference rounds twice.
CLOSE = {torch.float32: 1e-5, torch.bfloat16: 1.2e-2, torch.float16: 2e-3}
WRITTEN = ("order", "starts", "out")
# experts, top_k, hidden, middle, gated, bias, activation
SHAPES: list[tuple[int, int, int, int, bool, bool, str]] = [
    (4, 2, 64, 32, True, False, "silu"),
    (5, 3, 33, 70, False, True, "relu2"),
    (3, 1, 7, 1, True, True, "swiglu_clamped"),
    (8, 8, 130, 96, True, False, "gelu_pytorch_tanh"),
    (2, 2, 1, 45, False, False, "gelu"),
]


class TestTriton(PluginConformance):
    plugin = "op:moe_triton"


@dataclass
class Stacked:
    """A linear of all experts, as layers hold it."""

    spec: LinearSpec
    bias: Tensor | None
    weight: Tensor
    kernel: Any
    packed: Any = None


@dataclass
class Mixture:
    up: Stacked
    down: Stacked
    act: str

    @classmethod
    def make(cls, shape: tuple[int, int, int, int, bool, bool, str], dtype: torch.dtype) -> Mixture:
        num, _, hidden, middle, gated, biased, act = shape
        noise, made = torch.Generator().manual_seed(hidden + middle), []
        for name, parts, n, k in (("up", 1 + gated, middle, hidden), ("down", 1, hidden, middle)):
            names = tuple(f"{e}.{p}" for e in range(num) for p in range(parts))
            spec = LinearSpec(name, k, (n,) * (num * parts), biased, "none", names, (), num)
            weight = (torch.randn(spec.total_out, k, generator=noise) / 4).to(dtype)
            bias = torch.randn(spec.total_out, generator=noise).to(dtype) if biased else None
            made.append(Stacked(spec, bias, weight, KERNEL))
            made[-1].packed = KERNEL.pack(PLAIN, {"weight": weight.clone()}, spec, dtype)
        return cls(*made, act)

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return KERNEL.apply(x, ids, weights, self.up, self.down, self.act, ROWS)

    def reference(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """One expert at a time, in float64."""
        experts, made, dtype = LinearExperts(ReferenceLinear()), [], torch.float64
        for linear in (self.up, self.down):
            bias = None if linear.bias is None else linear.bias.to(dtype)
            packed = experts.pack(PLAIN, {"weight": linear.weight.to(dtype)}, linear.spec, dtype)
            made.append(Stacked(linear.spec, bias, linear.weight, experts, packed))
        return experts.apply(x.to(dtype), ids, weights.to(dtype), made[0], made[1], self.act, ROWS)


def batch(shape: tuple[Any, ...], tokens: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """x with gaps between its rows; the first experts are chosen more often, some of the last by nobody."""
    num, top_k, hidden = shape[:3]
    noise = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, hidden + 3, generator=noise).to(dtype)[:, :hidden]
    likely = torch.arange(num, 0, -1).double() ** 2
    ids = torch.multinomial(likely.expand(tokens, num), top_k, generator=noise)
    return x, ids, torch.rand(tokens, top_k, generator=noise).to(dtype)


def check(mixture: Mixture, x: Tensor, ids: Tensor, weights: Tensor, shuffle: int | None = None) -> Seen:
    with lab(unwritten=() if ids.min() < 0 else WRITTEN, shuffle=shuffle) as seen:
        got = mixture(x, ids, weights)
    want = mixture.reference(x, ids, weights)
    assert got.shape == want.shape
    assert got.dtype == x.dtype
    worst = float((got.double() - want).abs().max()) / max(1.0, float(want.abs().max()))
    assert worst <= CLOSE[x.dtype], f"{len(x)} tokens: off by {worst:.2e}"
    assert seen.launches == 4
    return seen


@pytest.mark.parametrize("dtype", CLOSE, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_equals_one_expert_at_a_time(shape: Any, dtype: torch.dtype) -> None:
    mixture = Mixture.make(shape, dtype)
    for tokens in (1, 3, 19):
        check(mixture, *batch(shape, tokens, dtype), shuffle=tokens)

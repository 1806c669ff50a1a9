"""Portable kernels: weights stay in float8 and are dequantised a slice of rows at a time."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from lmkit.api import DeviceInfo, LinearKernel, LinearSpec, PackedWeight, QuantFormat
from lmkit_layouts import FloatFormat, Rounding
from torch import Tensor
from torch.nn import functional as F

SLICE = 1 << 17  # weights dequantised at once: what a core's cache holds
SHIFT = 256.0  # how much `widen` shrinks a value; packed scales make up for it


@dataclass(frozen=True, slots=True)
class Fp8Weight:
    """weight [out, in] float8, scales * SHIFT [out, blocks of columns] float32, `columns` per block (0 = one block).

    Activations are rounded by `inputs`, if any, with `input_scale` where that is stored.
    """

    weight: Tensor
    scales: Tensor
    columns: int
    inputs: Rounding | None = None
    input_scale: float = 1.0

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes + self.scales.nbytes


class Fp8Torch(LinearKernel):
    """Rounds activations as the checkpoint says."""

    name = "fp8_torch"
    rounds = True
    caution = "it widens float8 weights in every step, and is several times slower than bfloat16 weights on CPUs"

    def can_run(self, fmt: QuantFormat, layer: LinearSpec, device: DeviceInfo) -> str | None:
        return None if isinstance(fmt, FloatFormat) else f"runs formats of float8 numbers, not {fmt.name!r}"

    def pack(self, fmt: QuantFormat, params: dict[str, Tensor], layer: LinearSpec, dtype: torch.dtype) -> Fp8Weight:
        assert isinstance(fmt, FloatFormat)
        found = fmt.floats(params, self.rounds)
        params.clear()
        scales = found.scales.repeat_interleave(found.rows, 0)[: len(found.codes)] * SHIFT
        return Fp8Weight(found.codes, scales, found.columns, fmt.inputs if self.rounds else None, found.input_scale)

    def apply(self, x: Tensor, weight: PackedWeight, bias: Tensor | None) -> Tensor:
        assert isinstance(weight, Fp8Weight)
        height, width = weight.weight.shape
        step = max(1, SLICE // width)
        x = x if weight.inputs is None else weight.inputs.apply(x, weight.input_scale)
        out = x.new_empty(*x.shape[:-1], height)
        for first in range(0, height, step):
            rows = slice(first, first + step)
            out[..., rows] = F.linear(x, _slice(weight, rows).to(x.dtype))
        return out if bias is None else out.add_(bias)


class Fp8Weights(Fp8Torch):
    """Leaves activations as they are: more precise than what the checkpoint is made for, and a little faster."""

    name = "fp8_weights"
    rounds = False


def widen(weight: Tensor) -> Tensor:
    """float8_e4m3fn -> float32, divided by SHIFT; exact for numbers, wrong for NaN. Four times as fast as a cast.

    Sign, exponent and mantissa are put where float16 has them: the value changes by the difference of the exponents'
    biases, 2^(7 - 15), for subnormal numbers too.
    """
    bits = weight.view(torch.int8).to(torch.int16).bitwise_left_shift_(7)
    return bits.bitwise_and_(-0x4001).view(torch.float16).float()  # the sign was extended into one bit too many


def _slice(packed: Fp8Weight, rows: slice) -> Tensor:
    """Rows of the weight in float32."""
    weight, scales = widen(packed.weight[rows]), packed.scales[rows]
    if not packed.columns:
        return weight.mul_(scales)
    whole = weight.shape[1] // packed.columns
    edge = whole * packed.columns
    weight[:, :edge].unflatten(1, (whole, packed.columns)).mul_(scales[:, :whole, None])
    if edge < weight.shape[1]:
        weight[:, edge:].mul_(scales[:, whole:])
    return weight

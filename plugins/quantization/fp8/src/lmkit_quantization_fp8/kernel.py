"""A portable kernel: weights stay in float8 and are dequantised a slice of rows at a time."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from lmkit.api import DeviceInfo, LinearKernel, LinearSpec, PackedWeight, QuantFormat
from torch import Tensor
from torch.nn import functional as F

from lmkit_quantization_fp8.scheme import Fp8Format

SLICE = 1 << 19  # weights dequantised at once: 2 MiB of float32, which stays in a core's cache


@dataclass(frozen=True, slots=True)
class Fp8Weight:
    """weight [out, in] float8, scales [out, blocks of columns] float32, `columns` per block (0 = one block)."""

    weight: Tensor
    scales: Tensor
    columns: int

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes + self.scales.nbytes


class Fp8Torch(LinearKernel):
    name = "fp8_torch"

    def can_run(self, fmt: QuantFormat, layer: LinearSpec, device: DeviceInfo) -> str | None:
        return None if isinstance(fmt, Fp8Format) else f"runs the format of this package, not {fmt.name!r}"

    def pack(self, fmt: QuantFormat, params: dict[str, Tensor], layer: LinearSpec, dtype: torch.dtype) -> Fp8Weight:
        assert isinstance(fmt, Fp8Format)
        packed = Fp8Weight(params["weight"], fmt.row_scales(params), fmt.block[1] if fmt.block else 0)
        params.clear()
        return packed

    def apply(self, x: Tensor, weight: PackedWeight, bias: Tensor | None) -> Tensor:
        assert isinstance(weight, Fp8Weight)
        height, width = weight.weight.shape
        step = max(1, SLICE // width)
        out = x.new_empty(*x.shape[:-1], height)
        for first in range(0, height, step):
            rows = slice(first, first + step)
            out[..., rows] = F.linear(x, _slice(weight, rows).to(x.dtype))
        return out if bias is None else out.add_(bias)


def _slice(packed: Fp8Weight, rows: slice) -> Tensor:
    """Rows of the weight in float32."""
    weight, scales = packed.weight[rows].float(), packed.scales[rows]
    if not packed.columns:
        return weight.mul_(scales)
    whole = weight.shape[1] // packed.columns
    edge = whole * packed.columns
    weight[:, :edge].unflatten(1, (whole, packed.columns)).mul_(scales[:, :whole, None])
    if edge < weight.shape[1]:
        weight[:, edge:].mul_(scales[:, whole:])
    return weight

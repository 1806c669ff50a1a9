"""A portable kernel: weights stay in 4 bits and are dequantised a slice of rows at a time."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from lmkit.api import DeviceInfo, LinearKernel, LinearSpec, PackedWeight, QuantFormat
from lmkit_layouts import Fp4Format
from lmkit_layouts.fp4 import unpack_fp4
from torch import Tensor
from torch.nn import functional as F

SLICE = 1 << 17  # weights dequantised at once: what a core's cache holds


@dataclass(frozen=True, slots=True)
class Fp4Weight:
    """codes uint8 [out, in / 2], scales [out, groups] as small as they are stored; `rows` [out, 1] float32 is what the
    scales of each row are multiplied by."""

    codes: Tensor
    scales: Tensor
    rows: Tensor | None

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in (self.codes, self.scales, self.rows) if t is not None)


class Fp4Torch(LinearKernel):
    name = "fp4_torch"
    caution = "it widens 4-bit weights in every step, and is many times slower than plain weights"

    def can_run(self, fmt: QuantFormat, layer: LinearSpec, device: DeviceInfo) -> str | None:
        return None if isinstance(fmt, Fp4Format) else f"runs 4-bit floats of lmkit-layouts, not {fmt.name!r}"

    def pack(self, fmt: QuantFormat, params: dict[str, Tensor], layer: LinearSpec, dtype: torch.dtype) -> Fp4Weight:
        assert isinstance(fmt, Fp4Format)
        rows = fmt.rows(params)
        packed = Fp4Weight(params[fmt.codes], fmt.scales(params), None if rows is None else rows.reciprocal().float())
        params.clear()
        return packed

    def apply(self, x: Tensor, weight: PackedWeight, bias: Tensor | None) -> Tensor:
        assert isinstance(weight, Fp4Weight)
        height, width = weight.codes.shape
        step = max(1, SLICE // max(2 * width, 1))
        out = x.new_empty(*x.shape[:-1], height)
        for some in (slice(first, first + step) for first in range(0, height, step)):
            out[..., some] = F.linear(x, _slice(weight, some).to(x.dtype))
        return out if bias is None else out.add_(bias)


def _slice(packed: Fp4Weight, some: slice) -> Tensor:
    """Rows of the weight in float32."""
    scales = packed.scales[some].float()
    if packed.rows is not None:
        scales.mul_(packed.rows[some])
    return unpack_fp4(packed.codes[some]).unflatten(1, (scales.shape[1], -1)).mul_(scales.unsqueeze(2)).flatten(1)

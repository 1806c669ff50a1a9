"""Linears of 4-bit codes that name values in a table, times the largest of their block."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from math import gcd, lcm

import torch
from lmkit.api import CheckpointError, LinearSpec, ParamSpec, PluginError, QuantFormat, UnsupportedModel
from torch import Tensor
from torch.nn import functional as F

BLOCK = 64  # weights that share a scale; blocks of producers are this or a power of two times as long
SLICE = 1 << 18  # values worked on at a time: what a processor's cache holds
# Quantiles of the normal distribution, and floating point numbers of 1, 2 and 1 bits: `get_4bit_type` of bitsandbytes.
VALUES: Mapping[str, tuple[float, ...]] = {
    "nf4": (
        -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
        -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634,
        0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
    ),
    "fp4": tuple(
        sign * value / 12 for sign in (1, -1) for value in (0, 0.0625, 8, 12, 4, 6, 2, 3)
    ),
}  # fmt: skip


@cache
def table(name: str) -> Tensor:
    """What each code is worth: [16] float32."""
    return torch.tensor(VALUES[name], dtype=torch.float32)


@cache
def pairs(name: str) -> Tensor:
    """What the two codes of each byte are worth, the high one first: [256, 2] float32."""
    one = table(name)
    return torch.stack([one.repeat_interleave(16), one.repeat(16)], 1)


def group_of(columns: int) -> int:
    """Columns of a row that lie in one block, wherever in blocks the row begins."""
    return gcd(columns, BLOCK)


@dataclass(frozen=True, slots=True)
class TableFormat(QuantFormat):
    """weight uint8 [out, in / 2], two codes in a byte, the high one first; weight_absmax float32 [out, in / group].

    `width` is the columns of the whole layer. `BitsandbytesTensors` makes these tensors of those of a file.
    """

    name: str  # of VALUES
    width: int

    @property
    def group(self) -> int:
        return group_of(self.width)

    def params(self, layer: LinearSpec, dtype: str) -> dict[str, ParamSpec]:
        if self.width % 2:
            raise UnsupportedModel(f"columns of {layer.name}", self.width, "an even number")
        if layer.in_features % lcm(self.group, 2):
            raise PluginError(f"{layer.name}: columns that share a scale would lie on two ranks")
        return {
            "weight": ParamSpec((layer.total_out, layer.in_features // 2), "uint8"),
            "weight_absmax": ParamSpec((layer.total_out, layer.in_features // self.group), "float32"),
        }

    def dequantize(self, params: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        weight, absmax = params["weight"], params["weight_absmax"]
        if not bool(absmax.isfinite().all()):
            raise CheckpointError("scales (absmax) are not numbers")
        n, k = weight.shape[0], weight.shape[1] * 2
        out, values = torch.empty((n, k), dtype=dtype), pairs(self.name)
        for rows in slices(n, k):
            found = F.embedding(weight[rows].int(), values).view(-1, k // self.group, self.group)
            out[rows] = (found * absmax[rows, :, None]).flatten(1)
        return out


@dataclass(frozen=True, slots=True)
class RoundedFormat(QuantFormat):
    """Stored as a plain weight [out, in]; every BLOCK columns of a row are rounded. `width` as above."""

    width: int
    name: str = "nf4"

    def params(self, layer: LinearSpec, dtype: str) -> dict[str, ParamSpec]:
        if layer.in_features != self.width and layer.in_features % BLOCK:
            raise PluginError(f"{layer.name}: columns that share a scale would lie on two ranks")
        return {"weight": ParamSpec((layer.total_out, layer.in_features), dtype)}

    def dequantize(self, params: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        weight = params["weight"]
        n, k = weight.shape
        out, values = torch.empty((n, k), dtype=dtype), table(self.name)
        bounds = (values[:-1] + values[1:]) / 2
        for rows in slices(n, k):
            padded = F.pad(weight[rows].float(), (0, -k % BLOCK)).unflatten(1, (-1, BLOCK))
            absmax = padded.abs().amax(-1, keepdim=True)
            codes = torch.bucketize(padded * (1 / absmax.clamp(min=1e-38)), bounds, out_int32=True)
            out[rows] = (F.embedding(codes, values[:, None])[..., 0] * absmax).flatten(1)[:, :k]
        return out


def slices(rows: int, columns: int) -> list[slice]:
    """Rows to work on at a time."""
    step = max(1, SLICE // max(columns, 1))
    return [slice(first, first + step) for first in range(0, rows, step)]

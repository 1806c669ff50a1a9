"""Linears of 4-bit codes that name values in a table, times the largest of their block.

Kernels of integers run them with the values of the table rounded to 8 bits; `dequantize` is exact.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import gcd, lcm
from typing import TYPE_CHECKING, Literal

from lmkit.api import (
    CannotSplit,
    CheckpointError,
    IntegerFormat,
    Integers,
    LinearSpec,
    ParamSpec,
    UnsupportedModel,
)

if TYPE_CHECKING:
    import torch
    from torch import Tensor

BLOCK = 64  # weights that share a scale; blocks of producers are this or a power of two times as long
STORAGE = ("uint8", "int8", "float16", "bfloat16", "float32", "float64")  # what bytes of codes are called in files


def group_of(columns: int) -> int:
    """Columns of a row that lie in one block, wherever in blocks the row begins."""
    return gcd(columns, BLOCK)


@dataclass(frozen=True, slots=True)
class TableFormat(IntegerFormat):
    """weight uint8 [out, in / 2], two codes in a byte, the high one first; weight_absmax float32 [out, in / group].

    `width` is the columns of the whole layer, `group` is `group_of` them. `BitsandbytesTensors` makes these tensors of
    those of a file.
    """

    name: str  # "nf4" or "fp4"
    width: int
    group: int
    bits: int = 4
    activations: Literal["float", "int8"] = "float"
    rounding: Literal["", "symmetric", "range"] = ""

    def params(self, layer: LinearSpec, dtype: str) -> dict[str, ParamSpec]:
        if self.width % 2:
            raise UnsupportedModel(f"columns of {layer.name}", self.width, "an even number")
        if layer.in_features % lcm(self.group, 2):
            raise CannotSplit(f"{layer.name}: columns that share a scale would lie on two ranks")
        return {
            "weight": ParamSpec((layer.total_out, layer.in_features // 2), "uint8"),
            "weight_absmax": ParamSpec((layer.total_out, layer.in_features // self.group), "float32"),
        }

    def dequantize(self, params: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        from lmkit_quantization_bitsandbytes import codes

        return codes.dequantize(params["weight"], self._absmax(params), self.name, dtype)

    def integers(self, params: Mapping[str, Tensor]) -> Integers:
        from lmkit_quantization_bitsandbytes import codes

        return codes.integers(codes.unpacked(params["weight"]), self._absmax(params), self.name)

    def _absmax(self, params: Mapping[str, Tensor]) -> Tensor:
        absmax = params["weight_absmax"]
        if not bool(absmax.isfinite().all()):
            raise CheckpointError("scales (absmax) are not numbers")
        return absmax


@dataclass(frozen=True, slots=True)
class RoundedFormat(IntegerFormat):
    """Stored as a plain weight [out, in]; every BLOCK columns of a row are rounded. `width` as above."""

    width: int
    name: str = "nf4"
    bits: int = 4
    group: int = BLOCK
    activations: Literal["float", "int8"] = "float"
    rounding: Literal["", "symmetric", "range"] = ""

    def params(self, layer: LinearSpec, dtype: str) -> dict[str, ParamSpec]:
        if layer.in_features != self.width and layer.in_features % BLOCK:
            raise CannotSplit(f"{layer.name}: columns that share a scale would lie on two ranks")
        return {"weight": ParamSpec((layer.total_out, layer.in_features), dtype)}

    def dequantize(self, params: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        from lmkit_quantization_bitsandbytes import codes

        return codes.rounded(params["weight"], BLOCK, self.name, dtype)

    def integers(self, params: Mapping[str, Tensor]) -> Integers:
        from lmkit_quantization_bitsandbytes import codes

        return codes.integers(*codes.nearest(params["weight"], BLOCK, self.name), self.name)

"""Linears of 4-bit codes that name values in a table, times the largest of their block."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import gcd, lcm
from typing import TYPE_CHECKING

from lmkit.api import CheckpointError, LinearSpec, ParamSpec, PluginError, QuantFormat, UnsupportedModel

if TYPE_CHECKING:
    import torch
    from torch import Tensor

BLOCK = 64  # weights that share a scale; blocks of producers are this or a power of two times as long
STORAGE = ("uint8", "int8", "float16", "bfloat16", "float32", "float64")  # what bytes of codes are called in files


def group_of(columns: int) -> int:
    """Columns of a row that lie in one block, wherever in blocks the row begins."""
    return gcd(columns, BLOCK)


@dataclass(frozen=True, slots=True)
class TableFormat(QuantFormat):
    """weight uint8 [out, in / 2], two codes in a byte, the high one first; weight_absmax float32 [out, in / group].

    `width` is the columns of the whole layer. `BitsandbytesTensors` makes these tensors of those of a file.
    """

    name: str  # "nf4" or "fp4"
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
        from lmkit_quantization_bitsandbytes import codes

        weight, absmax = params["weight"], params["weight_absmax"]
        if not bool(absmax.isfinite().all()):
            raise CheckpointError("scales (absmax) are not numbers")
        return codes.dequantize(weight, absmax, self.name, dtype)


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
        from lmkit_quantization_bitsandbytes import codes

        return codes.rounded(params["weight"], BLOCK, self.name, dtype)

"""Plain weights, rounded to float8 while they are loaded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lmkit.api import CannotSplit, LinearSpec, ParamSpec
from lmkit_layouts import FloatFormat, Floats
from lmkit_layouts.floats import checked

if TYPE_CHECKING:
    import torch
    from torch import Tensor

LARGEST = 448.0  # of float8 e4m3
SLICE = 1 << 18  # values rounded at a time: what a processor's cache holds


@dataclass(frozen=True, slots=True)
class RoundedFp8(FloatFormat):
    """Stored as a plain weight [out, in]; `width` is the columns of the whole layer. Each row has a scale."""

    width: int
    name: str = "fp8"
    columns: int = 0
    inputs: None = None

    def params(self, layer: LinearSpec, dtype: str) -> dict[str, ParamSpec]:
        if layer.in_features != self.width:
            raise CannotSplit(f"{layer.name}: columns that share a scale would lie on two ranks")
        return {"weight": ParamSpec((layer.total_out, layer.in_features), dtype)}

    def rounded(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """[out, in] -> [out, in] float8 and scales [out, 1]: the largest of a row becomes the largest number."""
        import torch

        n, k = weight.shape
        found = torch.empty((n, k), dtype=torch.float8_e4m3fn, device=weight.device)
        scales = torch.empty((n, 1), device=weight.device)
        step = max(1, SLICE // max(k, 1))
        for rows in (slice(first, first + step) for first in range(0, n, step)):
            values = weight[rows].float()
            scales[rows] = values.abs().amax(-1, keepdim=True) / LARGEST
            steps = torch.where(scales[rows] == 0, 0, scales[rows].reciprocal())
            found[rows] = (values * steps).clamp_(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
        return found, scales

    def floats(self, params: Mapping[str, Tensor], rounds: bool) -> Floats:
        codes, scales = self.rounded(params["weight"])
        return Floats(checked(codes), scales)

    def dequantize(self, params: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        weight, scales = self.rounded(params["weight"])
        return (weight.float() * scales).to(dtype)

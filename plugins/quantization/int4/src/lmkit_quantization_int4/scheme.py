"""Weights rounded to the nearest of 16 values per group of columns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from lmkit.api import CannotSplit, IntegerFormat, Integers, LinearSpec, ParamSpec, QuantScheme, UnsupportedModel
from lmkit_quantization_int8.scheme import Int8Format, Int8Scheme

from lmkit_quantization_int4.hooks import Options

if TYPE_CHECKING:
    import torch
    from torch import Tensor

KINDS: dict[str, type] = {"group_size": int, "zero_points": bool, "activations": str, "head": str}
MIDDLE = 8  # the code of 0 without zero points
SLICE = 1 << 18  # values rounded at a time: what a processor's cache holds


@dataclass(frozen=True, slots=True)
class Int4Scheme(QuantScheme):
    group_size: int = 64
    zero_points: bool = True
    activations: Literal["float", "int8"] = "int8"
    head: str = "int8"
    name: str = "int4"

    @classmethod
    def parse(cls, quantization_config: Mapping[str, object]) -> Int4Scheme:
        for key, value in quantization_config.items():
            kind = KINDS.get(key)
            if kind is None or type(value) is not kind:
                raise UnsupportedModel(key, value, ", ".join(f"{key}: {kind.__name__}" for key, kind in KINDS.items()))
        options = Options(**quantization_config)  # type: ignore[arg-type]
        activations: Literal["float", "int8"] = "float" if options.activations == "float" else "int8"
        return cls(options.group_size, options.zero_points, activations, options.head)

    def for_layer(self, layer: LinearSpec) -> Int4Format | Int8Format | None:
        """The output head has a say in every token and nothing behind it, so 4 bits cost most there."""
        if layer.is_head and self.head != "int4":
            return Int8Scheme().for_layer(layer) if self.head == "int8" else None
        return Int4Format(self.group_size, self.zero_points, layer.in_features, self.activations)


@dataclass(frozen=True, slots=True)
class Int4Format(IntegerFormat):
    """Stored as a plain weight; `width` is the columns of the whole layer."""

    group: int
    zero_points: bool
    width: int
    activations: Literal["float", "int8"] = "int8"
    name: str = "int4"
    bits: int = 4

    @property
    def rounding(self) -> Literal["", "symmetric", "range"]:
        return "range" if self.zero_points else "symmetric"

    def params(self, layer: LinearSpec, dtype: str) -> dict[str, ParamSpec]:
        if layer.in_features != self.width and layer.in_features % self.group:
            raise CannotSplit(f"{layer.name}: columns that share a scale would lie on two ranks")
        return {"weight": ParamSpec((layer.total_out, layer.in_features), dtype)}

    def integers(self, params: Mapping[str, Tensor]) -> Integers:
        import torch

        weight = params["weight"]
        n, k = weight.shape
        groups = -(-k // self.group)
        codes, scales = weight.new_empty((n, k), dtype=torch.uint8), weight.new_empty((n, groups), dtype=torch.float32)
        zeros = weight.new_full((n, groups), MIDDLE, dtype=torch.uint8)
        step = max(1, SLICE // max(k, 1))
        for rows in (slice(first, first + step) for first in range(0, n, step)):
            padded = torch.nn.functional.pad(weight[rows].float(), (0, -k % self.group))
            padded = padded.unflatten(1, (-1, self.group))
            if self.zero_points:  # the range includes 0, which is then exact
                low, high = padded.amin(-1).clamp_(max=0), padded.amax(-1).clamp_(min=0)
                scale = ((high - low) / 15).half().float()  # exact in float16
            else:
                low, scale = None, (padded.abs().amax(-1) / 7.5).half().float()
            steps = torch.where(scale > 0, scale.reciprocal(), 0)
            if low is not None:
                zeros[rows] = (-low * steps).round_().clamp_(0, 15)
            rounded = padded.mul_(steps[..., None]).add_(zeros[rows][..., None]).round_().clamp_(0, 15)
            codes[rows], scales[rows] = rounded.flatten(1)[:, :k], scale
        return Integers(codes, scales, zeros if self.zero_points else MIDDLE)

    def dequantize(self, params: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        import torch

        found = self.integers(params)
        k = found.codes.shape[1]
        scales = found.scales.repeat_interleave(self.group, 1)[:, :k]
        zeros = found.zeros
        if isinstance(zeros, torch.Tensor):
            zeros = zeros.float().repeat_interleave(self.group, 1)[:, :k]
        return ((found.codes.float() - zeros) * scales).to(dtype)

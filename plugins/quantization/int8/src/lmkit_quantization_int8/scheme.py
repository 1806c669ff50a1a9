"""Weights rounded to the nearest of 255 values, symmetric around zero."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from lmkit.api import CannotSplit, IntegerFormat, Integers, LinearSpec, ParamSpec, QuantScheme, UnsupportedModel

from lmkit_quantization_int8.hooks import Options

if TYPE_CHECKING:
    import torch
    from torch import Tensor

ZERO = 128  # the code of 0
SLICE = 1 << 18  # values rounded at a time: what a processor's cache holds


@dataclass(frozen=True, slots=True)
class Int8Scheme(QuantScheme):
    """`group_size` columns share a scale; 0 = all columns of a row."""

    group_size: int = 0
    name: str = "int8"

    @classmethod
    def parse(cls, quantization_config: Mapping[str, object]) -> Int8Scheme:
        return cls(int(_options(quantization_config, ("group_size",)).get("group_size", 0)))

    def for_layer(self, layer: LinearSpec) -> Int8Format:
        return Int8Format("int8", self.group_size, "float", layer.in_features)


@dataclass(frozen=True, slots=True)
class W8A8Scheme(QuantScheme):
    name: str = "w8a8"

    @classmethod
    def parse(cls, quantization_config: Mapping[str, object]) -> W8A8Scheme:
        _options(quantization_config, ())
        return cls()

    def for_layer(self, layer: LinearSpec) -> Int8Format:
        return Int8Format("w8a8", 0, "int8", layer.in_features)


@dataclass(frozen=True, slots=True)
class ExpertsInt8Scheme(QuantScheme):
    """Experts alone: most of a mixture's weights, and those that one token reads few of."""

    name: str = "experts_int8"

    @classmethod
    def parse(cls, quantization_config: Mapping[str, object]) -> ExpertsInt8Scheme:
        _options(quantization_config, ())
        return cls()

    def for_layer(self, layer: LinearSpec) -> Int8Format | None:
        """Also for a single one of those stacked in a layer, which has its name."""
        if not layer.experts and "experts" not in layer.name.split("."):
            return None
        return Int8Format("int8", 0, "float", layer.in_features)


def _options(given: Mapping[str, object], known: tuple[str, ...]) -> dict[str, int]:
    for key in given:
        if key not in known:
            raise UnsupportedModel(key, given[key], f"keys {', '.join(known) or 'none'}")
    size = given.get("group_size", 0)
    if not isinstance(size, int):
        raise UnsupportedModel("group_size", size, "a number of columns")
    return {"group_size": Options(size).group_size}


@dataclass(frozen=True, slots=True)
class Int8Format(IntegerFormat):
    """Stored as a plain weight; `width` is the columns of the whole layer."""

    name: str
    group: int
    activations: Literal["float", "int8"]
    width: int
    bits: int = 8
    rounding: Literal["", "symmetric", "range"] = "symmetric"

    def params(self, layer: LinearSpec, dtype: str) -> dict[str, ParamSpec]:
        if layer.in_features != self.width and (not self.group or layer.in_features % self.group):
            raise CannotSplit(f"{layer.name}: columns that share a scale would lie on two ranks")
        return {"weight": ParamSpec((layer.total_out, layer.in_features), dtype)}

    def integers(self, params: Mapping[str, Tensor]) -> Integers:
        import torch

        weight = params["weight"]
        n, k = weight.shape
        group = self.group or max(k, 1)
        codes = weight.new_empty((n, k), dtype=torch.uint8)
        scales = weight.new_empty((n, -(-k // group)), dtype=torch.float32)
        step = max(1, SLICE // max(k, 1))
        for rows in (slice(first, first + step) for first in range(0, n, step)):
            padded = torch.nn.functional.pad(weight[rows].float(), (0, -k % group)).unflatten(1, (-1, group))
            scale = (padded.abs().amax(-1) / 127).half().float()  # exact in float16
            steps = torch.where(scale > 0, scale.reciprocal(), 0)
            rounded = padded.mul_(steps[..., None]).add_(ZERO).round_().clamp_(1, 255)
            codes[rows], scales[rows] = rounded.flatten(1)[:, :k], scale
        return Integers(codes, scales, ZERO)

    def dequantize(self, params: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        found = self.integers(params)
        k = found.codes.shape[1]
        scales = found.scales.repeat_interleave(self.group or max(k, 1), 1)[:, :k]
        return ((found.codes.float() - ZERO) * scales).to(dtype)

"""Rounding to the nearest of the values that a few bits can say, in the tensors of compressed-tensors.

Source: `calculate_qparams`, `quantize` and `pack_to_int32` of the compressed-tensors library say what the tensors mean.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

FLOAT8_MAX = 448.0  # of float8_e4m3fn
WORD = 32


@dataclass(frozen=True, slots=True)
class Scheme:
    """How each linear is rounded. `group`: columns that share a scale; 0 = all of a row.

    `activations`: the format says that they are rounded to the same bits, a scale per token, where the result runs.
    """

    name: str
    bits: int
    group: int = 0
    symmetric: bool = True
    format: Literal["pack-quantized", "int-quantized", "float-quantized"] = "pack-quantized"
    activations: bool = False

    def config(self, ignored: list[str]) -> dict[str, Any]:
        """`quantization_config`: all linears but those that are `ignored`."""
        kind = "float" if self.format == "float-quantized" else "int"
        weights = {
            "num_bits": self.bits, "type": kind, "symmetric": self.symmetric, "dynamic": False,
            "strategy": "group" if self.group else "channel", "group_size": self.group or None,
        }  # fmt: skip
        per_token = {"num_bits": self.bits, "type": kind, "symmetric": True, "strategy": "token", "dynamic": True}
        group = {
            "targets": ["Linear"],
            "weights": weights,
            "input_activations": per_token if self.activations else None,
        }
        return {
            "quant_method": "compressed-tensors", "format": self.format, "quantization_status": "compressed",
            "config_groups": {"group_0": group}, "ignore": ignored,
        }  # fmt: skip

    def fits(self, columns: int) -> bool:
        return columns % (self.group or 1) == 0 and (
            self.format != "pack-quantized" or columns % (WORD // self.bits) == 0
        )

    def round(self, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        """[out, in] -> the tensors that are stored in place of `weight`, by name, and what they stand for, float32."""
        if self.format == "float-quantized":
            scale = _scale(weight.abs().amax(1, keepdim=True).float() / FLOAT8_MAX, weight.dtype)
            codes = (weight.float() / scale).clamp(-FLOAT8_MAX, FLOAT8_MAX).to(torch.float8_e4m3fn)
            return {"weight": codes, "weight_scale": scale.to(weight.dtype)}, codes.float() * scale
        scale, zeros = self._grid(weight)
        return self.store(weight, scale.to(weight.dtype), zeros)

    def store(self, weight: Tensor, scale: Tensor, zeros: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        """As `round`, to integers with these scales and zeros [out, groups]. Zeros are from -2^(bits - 1) on,
        and scales are stored as they are."""
        low, high = -(1 << (self.bits - 1)), (1 << (self.bits - 1)) - 1
        steps, offsets = scale.float()[..., None], zeros.float()[..., None]
        parts = weight.float().unflatten(1, (-1, self.group or weight.shape[1]))
        places = (parts / steps + offsets).round().clamp(low, high)
        codes, meant = places.flatten(1), ((places - offsets) * steps).flatten(1)
        stored = {"weight_scale": scale}
        if self.format == "int-quantized":
            return {"weight": codes.to(torch.int8), **stored}, meant
        stored |= {"weight_packed": pack(codes, self.bits), "weight_shape": torch.tensor(weight.shape)}
        if not self.symmetric:
            stored["weight_zero_point"] = pack(zeros.t(), self.bits).t().contiguous()
        return stored, meant

    def _grid(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Scales and zeros [out, groups], float32, that reach the largest weights."""
        low, high = -(1 << (self.bits - 1)), (1 << (self.bits - 1)) - 1
        parts = weight.float().unflatten(1, (-1, self.group or weight.shape[1]))
        if self.symmetric:
            scale = _scale(parts.abs().amax(-1) / ((high - low) / 2), weight.dtype)
            zeros = torch.zeros_like(scale)
        else:  # the range includes 0, which is then exact
            least, most = parts.amin(-1).clamp(max=0), parts.amax(-1).clamp(min=0)
            scale = _scale((most - least) / (high - low), weight.dtype)
            zeros = (low - least / scale).round().clamp(low, high)
        return scale, zeros


def _scale(scale: Tensor, dtype: torch.dtype) -> Tensor:
    """As it is stored; 1 where all weights are 0."""
    stored = scale.to(dtype).float()
    return torch.where(stored > 0, stored, torch.ones_like(stored))


def pack(codes: Tensor, bits: int) -> Tensor:
    """[n, k] codes from -2^(bits - 1) on -> int32 [n, ceil(k * bits / 32)], the first in the lowest bits."""
    per_word = WORD // bits
    places = torch.nn.functional.pad(codes.to(torch.int64) + (1 << (bits - 1)), (0, -codes.shape[1] % per_word))
    words = places.unflatten(1, (-1, per_word)) << torch.arange(0, WORD, bits)
    return words.sum(-1).to(torch.int32)  # two's complement: what is above 2^31 becomes negative


SCHEMES = {
    "int4": Scheme("int4", 4, 128),
    "int8": Scheme("int8", 8),
    "w8a8": Scheme("w8a8", 8, format="int-quantized", activations=True),
    "fp8": Scheme("fp8", 8, format="float-quantized", activations=True),
}

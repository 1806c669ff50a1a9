"""Rotary position embedding. The angles of a step are computed once and used by every layer."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from lmkit.api import RowOps, UnsupportedModel
from torch import Tensor, nn


class Rotary(nn.Module):
    """positions [T] -> (cos, sin), each [T, rotary_dim / 2] float32, for RowOps.rotate.

    `rope` comes from ConfigReader.rope. "dynamic" equals "default" here: it changes angles only beyond
    max_position_embeddings, and a model's max_length ends there.
    """

    inv_freq: Tensor  # [rotary_dim / 2] float32

    def __init__(self, head_dim: int, rope: Mapping[str, Any], rows: RowOps) -> None:
        super().__init__()
        inv_freq, self.magnitude = frequencies(int(head_dim * rope["partial"] + 1e-6), rope)
        self.register_buffer("inv_freq", inv_freq, persistent=False)
        self.rows = rows

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        return self.rows.angles(positions, self.inv_freq, self.magnitude)


def frequencies(dim: int, rope: Mapping[str, Any]) -> tuple[Tensor, float]:
    """Angular frequency of each pair [dim / 2] float32 and the factor on cos and sin. Raises UnsupportedModel."""
    try:
        inv_freq, magnitude = _frequencies(dim, rope)
    except (ArithmeticError, ValueError) as e:
        raise UnsupportedModel("rope_parameters", dict(rope), f"values that give angles ({e})") from e
    if not (inv_freq.isfinite().all() and math.isfinite(magnitude)):
        raise UnsupportedModel("rope_parameters", dict(rope), "values that give finite angles")
    return inv_freq, magnitude


def _frequencies(dim: int, rope: Mapping[str, Any]) -> tuple[Tensor, float]:
    steps = torch.arange(0, dim, 2, dtype=torch.int64, device="cpu").float() / dim
    inv_freq = 1.0 / rope["theta"] ** steps
    match rope["rope_type"]:
        case "default" | "dynamic":
            return inv_freq, 1.0
        case "linear":
            return inv_freq / rope["factor"], 1.0
        case "proportional":  # the fast pairs of the whole head turn, the others stand still
            inv_freq[int(rope["share"] * dim // 2) :] = 0
            return inv_freq / rope.get("factor", 1.0), 1.0
        case "llama3":
            return _llama3(inv_freq, rope), 1.0
        case "yarn":
            return _yarn(inv_freq, dim, rope)
        case "longrope":
            return _longrope(inv_freq, rope)
        case other:
            raise UnsupportedModel("rope_type", other)


def _llama3(inv_freq: Tensor, rope: Mapping[str, Any]) -> Tensor:
    """Long wavelengths are stretched by `factor`, short ones kept, those between blended."""
    low, high, length = rope["low_freq_factor"], rope["high_freq_factor"], rope["original_max_position_embeddings"]
    turns = length * inv_freq / (2 * math.pi)  # rotations over the original length
    blend = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - blend) * inv_freq / rope["factor"] + blend * inv_freq


def _yarn(inv_freq: Tensor, dim: int, rope: Mapping[str, Any]) -> tuple[Tensor, float]:
    """YaRN: interpolate slow pairs, keep fast ones, ramp between; attention temperature goes into cos and sin."""
    factor, theta, length = rope["factor"], rope["theta"], rope["original_max_position_embeddings"]

    def magnitude(mscale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0

    def pair_of(rotations: float) -> float:
        return dim * math.log(length / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = pair_of(rope.get("beta_fast", 32.0)), pair_of(rope.get("beta_slow", 1.0))
    if rope.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = ((torch.arange(dim // 2, dtype=torch.float32, device="cpu") - low) / ((high - low) or 0.001)).clamp(0, 1)
    blended = inv_freq / factor * ramp + inv_freq * (1 - ramp)

    scale = rope.get("attention_factor")
    if scale is None and rope.get("mscale") and rope.get("mscale_all_dim"):
        scale = magnitude(rope["mscale"]) / magnitude(rope["mscale_all_dim"])
    return blended, float(magnitude(1.0) if scale is None else scale)


def _longrope(inv_freq: Tensor, rope: Mapping[str, Any]) -> tuple[Tensor, float]:
    """LongRoPE: each pair is stretched by a factor of its own; a model made for more than the original length always
    uses the long ones, so that the result does not depend on how much of a prompt is computed at once."""
    positions, length = rope["max_position_embeddings"], rope["original_max_position_embeddings"]
    stretch = torch.tensor(rope["long_factor" if positions > length else "short_factor"], device="cpu")
    if stretch.shape != inv_freq.shape:
        raise UnsupportedModel("rope_parameters.long_factor", list(stretch.shape), f"{len(inv_freq)} numbers")
    ratio = rope.get("factor") or positions / length
    scale = rope.get("attention_factor")
    if scale is None:
        scale = 1.0 if ratio <= 1 else math.sqrt(1 + math.log(ratio) / math.log(length))
    return inv_freq / stretch, float(scale)

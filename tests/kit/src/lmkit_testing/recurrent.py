"""Rows and operands that operators of recurrent layers are tried on, whoever implements them."""

from __future__ import annotations

import math

import torch
from lmkit.api import StateBatch
from torch import Tensor

NAMES = ("causal_conv1d", "selective_scan", "ssd", "gated_delta_rule")
CLOSE = {torch.float32: 2e-4, torch.bfloat16: 1.6e-2, torch.float16: 2e-3}  # of the largest value


def batch_of(decode: int, prompts: list[int]) -> StateBatch:
    """Rows of one token, then prompts; each with a slot of its own, in no order, and one slot that is nobody's."""
    lengths = [1] * decode + prompts
    starts = [0, *torch.tensor(lengths, dtype=torch.int64).cumsum(0).tolist()]
    slots = list(reversed(range(1, len(lengths) + 1)))
    found = [(slots[i], starts[i], starts[i + 1]) for i in range(decode, len(lengths))]
    return StateBatch([], torch.tensor(slots), torch.tensor(starts, dtype=torch.int32), decode, found)


def operands(
    name: str, tokens: int, slots: int, sizes: tuple[int, int, int], dtype: torch.dtype, seed: int = 0
) -> list[Tensor | None]:
    """Arguments but the batch; the last is the state. Tensors have gaps between tokens where a model's have some."""
    g = torch.Generator().manual_seed(seed)

    def rand(*shape: int, gap: int = 0) -> Tensor:
        return torch.randn(*shape[:-1], shape[-1] + gap, generator=g)[..., : shape[-1]]

    def states(*shape: int) -> Tensor:
        """Those of one layer, between those of others."""
        return rand(slots, math.prod(shape) + 64)[:, 32:-32].unflatten(1, shape)

    wide, size, heads = sizes
    if name == "causal_conv1d":
        width = 2 + size % 3
        x, weight = rand(tokens, wide * 13, gap=5).to(dtype), rand(wide * 13, width).to(dtype)
        return [x, weight, rand(wide * 13).to(dtype) if seed % 2 else None, states(width - 1, wide * 13).to(dtype)]
    if name == "selective_scan":
        x, dt, (b, c) = rand(tokens, wide), rand(tokens, wide).abs(), (rand(tokens, size, gap=3) for _ in range(2))
        return [x, dt, -rand(wide, size).abs(), b, c, rand(wide), states(wide, size)]
    if name == "ssd":
        b, c = (rand(tokens, 2, size) for _ in range(2))
        x, dt = rand(tokens, 2 * heads, wide), rand(tokens, 2 * heads).abs()
        return [x, dt, -rand(2 * heads).abs(), b, c, rand(2 * heads), states(2 * heads, wide, size)]
    q, k = (rand(tokens, 2, size, gap=2).to(dtype) for _ in range(2))
    v, decay, beta = rand(tokens, 2 * heads, wide).to(dtype), -rand(tokens, 2 * heads).abs(), rand(tokens, 2 * heads)
    return [q, k, v, decay, beta.sigmoid(), states(2 * heads, size, wide)]

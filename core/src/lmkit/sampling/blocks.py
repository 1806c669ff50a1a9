"""Reductions over the vocabulary in two levels: first blocks of it, then inside one block per row.

Finding a position by value is slow in torch (one element at a time), reducing a block to its maximum or sum is not.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

BLOCK = 512  # vocabulary entries per block; the last one may be shorter


def _reduce(x: Tensor, how: str) -> Tensor:
    """[S, V] -> [S, ceil(V / BLOCK)]: "amax" or "sum" of each block, without a copy of x."""
    whole = x.shape[1] // BLOCK * BLOCK
    parts = []
    if whole:
        parts.append(getattr(x[:, :whole].unflatten(1, (-1, BLOCK)), how)(-1))
    if whole < x.shape[1]:
        parts.append(getattr(x[:, whole:], how)(-1, keepdim=True))
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


def _inside(x: Tensor, block: Tensor, fill: float) -> Tensor:
    """[S, BLOCK]: the entries of block [S] of each row, `fill` beyond the vocabulary."""
    columns = block[:, None] * BLOCK + torch.arange(BLOCK, device=x.device)
    if x.shape[1] % BLOCK == 0:
        return x.gather(1, columns)
    beyond = columns >= x.shape[1]
    return x.gather(1, columns.clamp_(max=x.shape[1] - 1)).masked_fill_(beyond, fill)


def argmax(x: Tensor) -> tuple[Tensor, Tensor]:
    """(first position of the maximum, maximum) of each row [S]. NaN counts as the largest value."""
    most, block = _reduce(x, "amax").max(-1)
    return block * BLOCK + _inside(x, block, -torch.inf).argmax(-1), most


def draw(w: Tensor, u: np.ndarray) -> Tensor:
    """The token at share u of each row's weight, in token order. w [S, V] non-negative, u [S] float64 in [0, 1)."""
    ends = _reduce(w, "sum").cumsum(-1, dtype=torch.float64)
    target = torch.from_numpy(u).to(w.device)[:, None] * ends[:, -1:]
    # Rounding may put a target behind the last weight; then the last block, and in it the last token, with one is it.
    block = torch.minimum(torch.searchsorted(ends, target, right=True), _last(ends))
    before = torch.where(block > 0, ends.gather(-1, (block - 1).clamp_(min=0)), 0.0)
    inside = _inside(w, block[:, 0], 0.0).cumsum(-1, dtype=torch.float64)
    offset = torch.minimum(torch.searchsorted(inside, target - before, right=True), _last(inside))
    return (block * BLOCK + offset)[:, 0]


def _last(ends: Tensor) -> Tensor:
    """[S, 1] index of the last entry with a weight, from cumulative weights [S, N]."""
    return torch.searchsorted(ends, ends[:, -1:].contiguous())

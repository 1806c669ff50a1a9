"""Reductions over the vocabulary in two levels: first blocks of it, then inside one block per row.

Finding a position by value is slow in torch (one element at a time), reducing a block to its maximum or sum is not.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

BLOCK = 512  # vocabulary entries per block; the last one may be shorter
SMALL = 128  # the same for topk, which looks into several blocks


def _reduce(x: Tensor, how: str, size: int = BLOCK) -> Tensor:
    """[S, V] -> [S, ceil(V / size)]: "amax" or "sum" of each block, without a copy of x."""
    whole = x.shape[1] // size * size
    parts = []
    if whole:
        parts.append(getattr(x[:, :whole].unflatten(1, (-1, size)), how)(-1))
    if whole < x.shape[1]:
        parts.append(getattr(x[:, whole:], how)(-1, keepdim=True))
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


def _inside(x: Tensor, blocks: Tensor, fill: float, size: int = BLOCK) -> tuple[Tensor, Tensor]:
    """Entries of blocks [S, N] of each row and their positions, both [S, N * size]; `fill` beyond the vocabulary."""
    columns = (blocks[..., None] * size + torch.arange(size, device=x.device)).flatten(1)
    if x.shape[1] % size == 0:
        return x.gather(1, columns), columns
    beyond = columns >= x.shape[1]
    return x.gather(1, columns.clamp_(max=x.shape[1] - 1)).masked_fill_(beyond, fill), columns


def argmax(x: Tensor) -> tuple[Tensor, Tensor]:
    """(first position of the maximum, maximum) of each row [S]. NaN counts as the largest value."""
    most, block = _reduce(x, "amax").max(-1)
    return block * BLOCK + _inside(x, block[:, None], -torch.inf)[0].argmax(-1), most


def topk(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """(values, positions) of the k largest of each row, largest first, [S, k].

    They are found in the k blocks with the largest maxima: a block left out has no value larger than any of those k.
    """
    if 4 * k * SMALL > x.shape[1]:
        values, positions = x.topk(k, dim=-1)
        return values, positions
    chosen = _reduce(x, "amax", SMALL).topk(k, dim=-1).indices
    inside, columns = _inside(x, chosen, -torch.inf, SMALL)
    values, where = inside.topk(k, dim=-1)
    return values, columns.gather(1, where)


def draw(w: Tensor, u: np.ndarray) -> Tensor:
    """The token at share u of each row's weight, in token order. w [S, V] non-negative, u [S] float64 in [0, 1)."""
    ends = _reduce(w, "sum").cumsum(-1, dtype=torch.float64)
    target = torch.from_numpy(u).to(w.device)[:, None] * ends[:, -1:]
    # Rounding may put a target behind the last weight; then the last block, and in it the last token, with one is it.
    block = torch.minimum(torch.searchsorted(ends, target, right=True), _last(ends))
    before = torch.where(block > 0, ends.gather(-1, (block - 1).clamp_(min=0)), 0.0)
    inside = _inside(w, block, 0.0)[0].cumsum(-1, dtype=torch.float64)
    offset = torch.minimum(torch.searchsorted(inside, target - before, right=True), _last(inside))
    return (block * BLOCK + offset)[:, 0]


def _last(ends: Tensor) -> Tensor:
    """[S, 1] index of the last entry with a weight, from cumulative weights [S, N]."""
    return torch.searchsorted(ends, ends[:, -1:].contiguous())

"""min_p, top_k and top_p without sorting the vocabulary, and drawing from weights."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

DRAW_BLOCK = 512  # vocabulary entries summed at once when drawing


def min_p_(x: Tensor, min_p: Tensor) -> None:
    """Removes tokens less likely than min_p times the most likely. In place on log-weights x [S, V], row maximum 0."""
    x.masked_fill_(x < min_p.log()[:, None], -torch.inf)


def top_k_(x: Tensor, k: Tensor) -> None:
    """Keeps the k largest of each row, and equals of the k-th. x [S, V], k [S] int64, 1 <= k <= V; in place."""
    largest = x.topk(int(k.max()), dim=-1).values
    x.masked_fill_(x < largest.gather(-1, k[:, None] - 1), -torch.inf)


def top_p_(w: Tensor, p: Tensor) -> None:
    """Keeps the most likely tokens until they hold a share p of the row's weight, and equals of the last. In place.

    w [S, V] non-negative weights; p [S]. Looks at the few largest first and widens only for the rows that need more,
    so what a row gets does not depend on its neighbours.
    """
    target = p.double() * w.sum(-1, dtype=torch.float64)
    rows = torch.arange(len(w), device=w.device)
    width = 64
    while len(rows):
        width = min(width, w.shape[-1])
        part = w[rows]
        largest = part.topk(width, dim=-1).values
        reached = largest.cumsum(-1, dtype=torch.float64) >= target[rows, None]
        done = reached[:, -1]
        if width == w.shape[-1]:
            reached[:, -1] = done = torch.ones_like(done)
        last = reached.int().argmax(-1)[done]  # first index where the share is reached
        threshold = largest[done].gather(-1, last[:, None])
        kept = part[done]
        w[rows[done]] = kept.masked_fill_(kept < threshold, 0.0)
        rows = rows[~done]
        width *= 16


def draw(w: Tensor, u: np.ndarray) -> Tensor:
    """The token at share u of each row's weight, in token order. w [S, V] non-negative, u [S] float64 in [0, 1).

    Inverse transform in two levels, so that only one block per row is accumulated token by token.
    """
    num_rows, size = w.shape
    num_blocks = -(-size // DRAW_BLOCK)
    if size % DRAW_BLOCK:
        w = torch.nn.functional.pad(w, (0, num_blocks * DRAW_BLOCK - size))
    blocks = w.view(num_rows, num_blocks, DRAW_BLOCK)
    ends = blocks.sum(-1).cumsum(-1, dtype=torch.float64)
    target = torch.from_numpy(u).to(w.device)[:, None] * ends[:, -1:]
    # Rounding may put a target behind the last weight; then the last block, and in it the last token, with one is it.
    block = torch.minimum(torch.searchsorted(ends, target, right=True), _last(ends))
    before = torch.where(block > 0, ends.gather(-1, (block - 1).clamp_(min=0)), 0.0)
    inside = blocks[torch.arange(num_rows, device=w.device), block[:, 0]].cumsum(-1, dtype=torch.float64)
    offset = torch.minimum(torch.searchsorted(inside, target - before, right=True), _last(inside))
    return (block * DRAW_BLOCK + offset)[:, 0]


def _last(ends: Tensor) -> Tensor:
    """[S, 1] index of the last entry with a weight, from cumulative weights [S, N]."""
    return torch.searchsorted(ends, ends[:, -1:].contiguous())

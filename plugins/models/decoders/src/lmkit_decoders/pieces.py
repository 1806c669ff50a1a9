"""Prompts of a step in pieces, several rows in one go: what linear recurrences run on."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from lmkit.api import StateBatch
from torch import Tensor

MAX_ROWS = 16  # rows of a piece, where launches count: what is between reading and writing grows with them
HOST_ROWS = 1  # on the host, where a piece of one row stays in the caches


class Piece:
    """The next C tokens of P rows that follow one another. Those that have fewer left get zeros behind.

    Tokens of one row are views; those of several are gathered, and what a step computes has one token more, in which
    results for no token end.
    """

    def __init__(self, slots: int | Tensor, at: slice | Tensor, nobody: Tensor | None = None) -> None:
        """`slots` [P], `at` [P, C] tokens, and which are `nobody`'s [P, C]; or those of one row."""
        self.slots, self.at, self._nobody = slots, at, nobody

    def take(self, x: Tensor) -> Tensor:
        """x [T, ...] -> [P, C, ...]: behind the end of a row stands some other token."""
        return x[self.at][None] if self._nobody is None else x[self.at]

    def ending(self, x: Tensor) -> Tensor:
        """The same with zeros behind the end of a row."""
        taken = self.take(x)
        if self._nobody is None:
            return taken
        return taken.masked_fill(self._nobody.view(*self._nobody.shape, *(1,) * (taken.dim() - 2)), 0)

    def put(self, out: Tensor, y: Tensor) -> None:
        """y [P, C, ...] into out [T + 1, ...]."""
        if isinstance(self.at, slice) or self._nobody is None:
            out[self.at] = y[0]
        else:
            at = self.at.masked_fill(self._nobody, len(out) - 1)
            out.index_copy_(0, at.flatten(), y.flatten(0, 1).to(out.dtype))

    def state(self, state: Tensor) -> Tensor:
        """A layer's state [slots, ...] -> that of the rows [P, ...]."""
        return state[self.slots] if isinstance(self.slots, Tensor) else state[self.slots][None]

    def renew(self, state: Tensor, new: Tensor) -> None:
        """The rows' state becomes `new` [P, ...]."""
        if isinstance(self.slots, Tensor):
            state[self.slots] = new
        else:
            state[self.slots] = new[0]


def pieces(rows: StateBatch, size: int) -> Iterator[Piece]:
    """The prompts of a step, at most `size` tokens of a row in one piece; those of a row come in order.

    Which rows go together is known on the host, and where their tokens are on the device: nobody waits.
    """
    together = HOST_ROWS if rows.slots.device.type == "cpu" else MAX_ROWS
    lengths = [end - first for _, first, end in rows.prompts]
    for done in range(0, max(lengths, default=0), size):
        left = [i for i, length in enumerate(lengths) if length > done]
        for low in range(left[0], left[-1] + 1, together):
            some = [i for i in left if low <= i < low + together]
            if len(some) == 1:
                slot, first, end = rows.prompts[some[0]]
                yield Piece(slot, slice(first + done, min(first + done + size, end)))
            elif some:
                most = max(min(lengths[i] - done, size) for i in some)
                yield _several(rows, some[0], some[-1] + 1, done, most)


def _several(rows: StateBatch, low: int, high: int, done: int, size: int) -> Piece:
    """Tokens [done, done + size) of prompts [low, high)."""
    low, high = low + rows.num_decode_rows, high + rows.num_decode_rows
    begin = rows.query_start[low:high].long() + done
    at = begin[:, None] + torch.arange(size, device=begin.device)
    nobody = at >= rows.query_start[low + 1 : high + 1, None]
    return Piece(rows.slots[low:high], at.clamp_(max=rows.prompts[-1][2] - 1), nobody)

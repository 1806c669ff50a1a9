"""Host work of a step: which pages the tiles of each row read, once for all layers.

Rows of one query are one task; every other row is a task of its own. A task knows its pages twice: in the order of
their tokens, and from the place of a page in memory back to that order, which the mask of a compiled kernel needs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from lmkit.api import AttnBatch, AttnNeed
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

TILE = 128  # queries that share a list of pages


@dataclass(slots=True)
class Task:
    """B rows of Q queries each, of whose keys P pages are looked at."""

    tokens: Tensor | slice  # [B * Q] rows of q and out
    shape: tuple[int, int]  # B, Q
    pages: Tensor  # [B, P] int64, in order; the last one is repeated where a row has fewer
    numbers: Tensor  # [B, P] int32, which of the row's pages they are
    base: Tensor  # [B] int64, position of the first token in them
    first: Tensor  # [B] int64, position of the first query
    length: Tensor  # [B] int64
    partly: tuple[Tensor, Tensor]  # pages of which each tile sees some: [B, 1, tiles] and [B, 1, tiles, P] int32
    wholly: tuple[Tensor, Tensor]  # the same of those that all its queries see as a whole
    mask: BlockMask | None = None  # made by the first layer
    order: Tensor | None = None  # [B, num_blocks] int32, which of the row's pages each is; -1: none. None: not needed


@dataclass(slots=True)
class FlexPlan:
    slots: Tensor  # [T] int64
    tasks: list[Task]
    fresh: Tensor  # [N] int64, slots behind the last token in pages that begin in this step
    need: AttnNeed
    slopes: Tensor | None  # [num_q_heads] float32, for alibi


class FlexPlanner:
    capture: Literal["none", "decode", "any"] = "none"

    def __init__(self, need: AttnNeed, device: torch.device) -> None:
        self.need, self.device = need, device
        self.slopes = torch.tensor(need.slopes, device=device) if need.alibi else None

    def plan(self, batch: AttnBatch) -> FlexPlan:
        n = batch.num_rows
        starts, lengths = batch.query_start.host[: n + 1].numpy(), batch.seq_len.host[:n].numpy()
        counts, table = np.diff(starts), batch.table.host[:n].numpy()
        busy = np.flatnonzero((counts > 0) & (lengths > 0))
        single = [int(row) for row in busy if counts[row] == 1]
        groups = [single] * bool(single) + [[int(row)] for row in busy if counts[row] > 1]
        tasks = [self._task(starts[rows], int(counts[rows[0]]), lengths[rows], table[rows]) for rows in groups]
        fresh = [self._fresh(int(counts[row]), int(lengths[row]), table[row]) for row in busy]
        behind = self._put(np.concatenate([np.zeros(0, np.int64), *fresh]))
        return FlexPlan(batch.slots.push(batch.num_tokens), tasks, behind, self.need, self.slopes)

    def _task(self, starts: np.ndarray, queries: int, lengths: np.ndarray, table: np.ndarray) -> Task:
        """Rows of so many queries each, from `starts` of q; their lengths [B] and pages [B, ...]."""
        size, begin, lengths = self.need.block_size, np.arange(0, queries, TILE), lengths.astype(np.int64)
        first = lengths - queries
        # What a query sees begins and ends no sooner than what the one before it sees.
        start, first_end = self._sees(first[:, None] + begin, lengths)
        last_start, end = self._sees(first[:, None] + np.minimum(begin + TILE, queries) - 1, lengths)
        low, high = start // size, -(-end // size)  # [B, tiles], pages that a query of the tile sees
        begins = np.minimum(-(-last_start // size), high)  # of those, the ones that all its queries see as a whole
        ends = np.maximum(first_end // size, begins)
        base, behind = low.min(1), high.max(1)
        width, rows = np.arange(int((behind - base).max())), np.arange(len(lengths))

        def listed(numbers: np.ndarray) -> np.ndarray:
            """[B, tiles, P] pages of the rows; behind the last the last."""
            return table[rows[:, None, None], np.minimum(numbers, behind[:, None, None] - 1)]

        numbers = np.minimum(base[:, None] + width, behind[:, None] - 1)
        before = (begins - low)[..., None]
        partly = np.where(width < before, low[..., None] + width, ends[..., None] + width - before)
        together = starts[-1] - starts[0] == len(starts) - 1
        return Task(
            slice(int(starts[0]), int(starts[-1]) + queries) if together else self._put(starts),
            (len(lengths), queries), self._put(table[rows[:, None], numbers]), self._put(numbers, np.int32),
            self._put(base * size), self._put(first), self._put(lengths),
            self._list(high - low - ends + begins, listed(partly)),
            self._list(ends - begins, listed(begins[..., None] + width)),
        )  # fmt: skip

    def _sees(self, position: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The first key that each query at `position` [B, tiles] sees, and one behind the last."""
        need, window = self.need, self.need.window
        low, high = np.zeros_like(position), np.broadcast_to(lengths[:, None], position.shape)
        if window is not None:
            chunk = position // window * window
            low = chunk if need.chunked else np.maximum(position - window + 1, 0)
            high = np.minimum(high, chunk + window if need.chunked else position + window)
        return low, position + 1 if need.causal else high

    def _list(self, count: np.ndarray, pages: np.ndarray) -> tuple[Tensor, Tensor]:
        return self._put(count[:, None], np.int32), self._put(pages[:, None], np.int32)

    def _fresh(self, count: int, length: int, pages: np.ndarray) -> np.ndarray:
        """Slots behind the last token of a row, if its last page begins in this step."""
        size = self.need.block_size
        page, used = divmod(length - 1, size)
        if page * size < length - count:
            return np.zeros(0, np.int64)
        return int(pages[page]) * size + np.arange(used + 1, size)

    def _put(self, x: np.ndarray, dtype: type = np.int64) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(x, dtype)).to(self.device)

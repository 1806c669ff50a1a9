"""Host work of a step: which cached positions each row reads, as index and bias tensors shared by all layers.

Rows become tasks. Decode rows (one query) are batched: rows of similar length share one padded task, in which padding
repeats a position of the row itself, so that memory which was never written is never read. Longer rows are one task per
piece of queries.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch
from lmkit.api import AttnBatch, AttnNeed
from torch import Tensor

PIECE = 1024  # queries of one prefill task that needs an explicit bias
SMALL = 256  # decode rows shorter than this share a task whatever their lengths
BITS, ALL = 64, -1  # of AttnBatch.tree


@dataclass(slots=True)
class Task:
    """B rows of Q queries that read L cached positions each."""

    tokens: Tensor | slice  # [B * Q] rows of q and out
    index: Tensor  # [B * L] int64 slots to read
    shape: tuple[int, int, int]  # B, Q, L
    hidden: Tensor | None = None  # [B, Q, L] bool, True = not visible
    distance: Tensor | None = None  # [B, Q, L] query position - key position, for alibi
    is_causal: bool = False  # Q == L and plain causal: no bias needed
    _bias: dict[torch.dtype, Tensor] = field(default_factory=dict)

    def bias(self, dtype: torch.dtype) -> Tensor | None:
        """[B, Q, L] added to scores: 0 or -inf. Made at the first layer, used by all."""
        if self.hidden is None:
            return None
        if dtype not in self._bias:
            self._bias[dtype] = torch.zeros(self.hidden.shape, dtype=dtype, device=self.hidden.device).masked_fill_(
                self.hidden, -torch.inf
            )
        return self._bias[dtype]


@dataclass(slots=True)
class TorchPlan:
    slots: Tensor  # [T] int64
    tasks: list[Task]
    need: AttnNeed
    slopes: Tensor | None  # [num_q_heads] float32, for alibi


class TorchPlanner:
    capture: Literal["none", "decode", "any"] = "none"

    def __init__(self, need: AttnNeed, device: torch.device) -> None:
        self.need, self.device = need, device
        self.slopes = torch.tensor(need.slopes, device=device) if need.alibi else None

    def plan(self, batch: AttnBatch) -> TorchPlan:
        num_rows = batch.num_rows
        starts: list[int] = batch.query_start.host[: num_rows + 1].tolist()
        lengths: list[int] = batch.seq_len.host[:num_rows].tolist()
        tree = batch.tree.host[: batch.num_tokens] if batch.tree is not None else None
        tasks: list[Task] = []
        decode: list[tuple[int, int, int, int]] = []  # token, row, first visible position, length
        for row, (start, end, length) in enumerate(zip(starts, starts[1:], lengths, strict=False)):
            if end == start or length == 0:
                continue
            branches = tree is not None and bool((tree[start:end] != ALL).any())
            if end - start == 1 and self.need.causal and not branches:
                decode.append((start, row, self._first(length - 1), length))
            else:
                tasks += self._prefill(batch, row, start, end, length, tree if branches else None)
        tasks += [self._decode(batch, group) for group in _similar(decode)]
        return TorchPlan(batch.slots.push(batch.num_tokens), tasks, self.need, self.slopes)

    def _first(self, query: int) -> int:
        """First position that the one at `query` sees."""
        window = self.need.window
        if window is None:
            return 0
        return query // window * window if self.need.chunked else max(0, query + 1 - window)

    def _prefill(
        self, batch: AttnBatch, row: int, start: int, end: int, length: int, tree: Tensor | None
    ) -> list[Task]:
        """Tasks of a row with several queries: positions [length - (end - start), length).

        `tree`: that of the batch, where the row branches.
        """
        need, count = self.need, end - start
        plain = need.window is None and not need.alibi and need.softcap is None and not need.sinks and tree is None
        if (not need.causal and need.window is None) or (plain and count == length):
            index = self._slots(batch, row, torch.arange(length))
            distance = torch.arange(length)[-count:, None] - torch.arange(length) if need.alibi else None
            return [
                Task(
                    slice(start, end),
                    index,
                    (1, count, length),
                    distance=None if distance is None else distance[None].to(self.device),
                    is_causal=need.causal,
                )
            ]
        tasks = []
        for first in range(start, end, PIECE):
            last = min(first + PIECE, end)
            queries = torch.arange(length - (end - first), length - (end - last))
            low = self._first(int(queries[0]))
            high = int(queries[-1]) + 1 if need.causal else min(length, int(queries[-1]) + (need.window or length))
            keys = torch.arange(low, high)
            distance = (queries[:, None] - keys)[None]
            hidden = distance < 0 if need.causal else torch.zeros_like(distance, dtype=torch.bool)
            if need.window is not None:
                hidden |= distance.abs() >= need.window
            if need.window is not None and need.chunked:
                hidden |= (queries[:, None] // need.window != keys // need.window)[None]
            if tree is not None:
                hidden |= ~_seen(tree[first:last], length - 1 - keys)[None]
            tasks.append(
                Task(
                    slice(first, last),
                    self._slots(batch, row, keys),
                    (1, last - first, len(keys)),
                    hidden.to(self.device),
                    distance.to(self.device) if need.alibi else None,
                )
            )
        return tasks

    def _decode(self, batch: AttnBatch, group: list[tuple[int, int, int, int]]) -> Task:
        """One task for rows with one query each."""
        group = sorted(group)  # in batch order
        token, rows, low, length = torch.tensor(group).unbind(1)
        width = int((length - low).max())
        columns = torch.arange(width)
        positions = torch.minimum(low[:, None] + columns, length[:, None] - 1)
        blocks = batch.table.host[rows[:, None], positions // self.need.block_size].long()
        index = blocks * self.need.block_size + positions % self.need.block_size
        ragged = bool((length - low != width).any())
        first, last = group[0][0], group[-1][0]
        together = last - first == len(group) - 1
        return Task(
            slice(first, last + 1) if together else token.to(self.device),
            index.flatten().to(self.device),
            (len(group), 1, width),
            (columns >= (length - low)[:, None])[:, None].to(self.device) if ragged else None,
            (length[:, None] - 1 - positions)[:, None].to(self.device) if self.need.alibi else None,
        )

    def _slots(self, batch: AttnBatch, row: int, positions: Tensor) -> Tensor:
        size = self.need.block_size
        blocks = batch.table.host[row][positions // size].long()
        return (blocks * size + positions % size).to(self.device)


def _seen(tree: Tensor, back: Tensor) -> Tensor:
    """Whether queries with the bits `tree` [Q] see keys so many places before the row's last, `back` [L]: [Q, L]."""
    return (back >= BITS) | ((tree[:, None] >> back.clamp(max=BITS - 1)) & 1).bool()


def _similar(rows: list[tuple[int, int, int, int]]) -> list[list[tuple[int, int, int, int]]]:
    """Groups in which no row is padded to more than twice its visible length (short ones to at most SMALL)."""
    groups: list[list[tuple[int, int, int, int]]] = []
    longest = 0
    for row in sorted(rows, key=lambda r: r[2] - r[3]):
        visible = row[3] - row[2]
        if not groups or (longest > SMALL and 2 * visible < longest):
            groups.append([])
            longest = visible
        groups[-1].append(row)
    return groups

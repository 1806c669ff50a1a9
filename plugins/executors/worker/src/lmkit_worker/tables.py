"""StepTable: the blocks of a step's rows, of which only what has changed since the step before is written and sent."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from lmkit_worker.buffers import ArrayBuffer

if TYPE_CHECKING:
    from lmkit.api import Platform
    from torch import Tensor

    from lmkit_worker.rows import RowTable

CELLS = 16384  # entries that are sent one by one; more are sent with all others
NOBODY, UNKNOWN = -1, -2  # slots of rows that stand for nothing, and of rows never filled


class StepTable:
    """The Buffer `table` of an AttnBatch, [R, max_blocks] int32 in the order of the plan, for one KV group.

    A slot's blocks are only added to while it has the same row, so what a row of the batch held in the step before is
    right where it stands. What `push` gives lies where it lay, at every step and for any number of rows.
    """

    def __init__(self, rows: RowTable, group: int, platform: Platform) -> None:
        self._rows, self._blocks, self._counts = rows, rows.table[group], rows.num_blocks[group]
        self._whole = ArrayBuffer(platform.buffer(self._blocks.shape, torch.int32))
        self.host, self.device = self._whole.buffer.host, self._whole.buffer.device
        self.array = self._whole.array
        self._one = self.host.data_ptr() == self.device.data_ptr() and self.host.device == self.device.device
        if not self._one:
            self._where = ArrayBuffer(platform.buffer((CELLS,), torch.int64))
            self._what = ArrayBuffer(platform.buffer((CELLS,), torch.int32))
        # What each row of the batch holds: so many blocks of the slot, in the turn that the slot had.
        num_rows = len(self._blocks)
        self._slots = np.full(num_rows, UNKNOWN, np.int64)
        self._turns = np.zeros(num_rows, np.int64)
        self._filled = np.zeros(num_rows, np.int64)
        self._unsent: list[np.ndarray] = []  # cells written since the last push
        self._num_unsent = 0

    def fill(self, slots: np.ndarray) -> None:
        """Rows [0, R) get the blocks of `slots` [R]."""
        n = len(slots)
        counts, turns = self._counts[slots], self._rows.turn[slots]
        same = (self._slots[:n] == slots) & (self._turns[:n] == turns)
        begin = np.where(same, self._filled[:n], 0)
        fresh = np.flatnonzero(counts > begin)
        self._slots[:n], self._turns[:n], self._filled[:n] = slots, turns, counts
        if not len(fresh):
            return
        first, lengths = begin[fresh], (counts - begin)[fresh]
        total = int(lengths.sum())
        if self._one or self._num_unsent + total > CELLS:
            for row, slot, start, end in zip(
                fresh.tolist(), slots[fresh].tolist(), first.tolist(), counts[fresh].tolist(), strict=True
            ):
                self.array[row, start:end] = self._blocks[slot, start:end]
            self._num_unsent = CELLS + 1
            return
        columns = np.arange(total) + np.repeat(first - np.cumsum(lengths) + lengths, lengths)
        which = np.repeat(fresh, lengths)
        self.array[which, columns] = self._blocks[slots[which], columns]
        self._note(which * self.array.shape[1] + columns)

    def pad(self, begin: int, end: int) -> None:
        """Rows [begin, end) stand for nothing: they may read the null block alone."""
        fresh = np.flatnonzero(self._slots[begin:end] != NOBODY) + begin
        self._slots[fresh] = NOBODY
        self.array[fresh, 0] = 0
        self._note(fresh * self.array.shape[1])

    def _note(self, cells: np.ndarray) -> None:
        if len(cells):
            self._unsent.append(cells)
            self._num_unsent += len(cells)

    def push(self, n: int) -> Tensor:
        """As a Buffer's."""
        if self._one:
            return self._whole.push(n)
        if self._num_unsent > CELLS:
            self._whole.push(len(self.array))
        elif self._num_unsent:
            count, cells = self._num_unsent, np.concatenate(self._unsent)
            self._where.array[:count] = cells
            self._what.array[:count] = self.array.reshape(-1)[cells]
            self.device.view(-1).index_copy_(0, self._where.push(count), self._what.push(count))
        self._unsent.clear()
        self._num_unsent = 0
        return self.device[:n]

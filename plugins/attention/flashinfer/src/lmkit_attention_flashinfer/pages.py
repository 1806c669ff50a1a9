"""The integers of a step: made on the host, sent in one copy, and on the device the list of the pages of its rows."""

from __future__ import annotations

import numpy as np
import torch
from lmkit.api import AttnBatch, StepLimits
from torch import Tensor


class Part:
    """Integers on the host and their place on the device. They must not be written again before they have arrived:
    flashinfer copies some of them itself, from the host side."""

    def __init__(self, host: Tensor, device: Tensor) -> None:
        self.host, self.array, self.device = host, host.numpy(), device


class StepIntegers:
    """What flashinfer is told about the rows of a step that have queries, in one buffer: pinned, if there is a device.

    Parts for some of the rows begin where those of the rows before end. The list of pages is made on the device, from
    the block table there, of which only changes are sent: it costs the host nothing, however long the rows are.
    """

    def __init__(self, limits: StepLimits, device: torch.device) -> None:
        rows, most = limits.max_rows, limits.max_rows * limits.max_blocks_per_row
        if most > torch.iinfo(torch.int32).max:
            raise ValueError(f"{most} pages in a step: more than flashinfer can number")
        sizes = (rows + 2, rows + 1, rows, rows, rows, rows)
        host = torch.zeros(sum(sizes), dtype=torch.int32)
        self._host = host if device.type == "cpu" else host.pin_memory()
        self._device = torch.zeros(sum(sizes), dtype=torch.int32, device=device)
        parts = [Part(*pair) for pair in zip(self._host.split(sizes), self._device.split(sizes), strict=True)]
        self.indptr, self.query_start, self.last_page, self.lengths, self._counts, self._cells = parts
        self._numbers = torch.arange(most, dtype=torch.int32, device=device)
        self.pages = torch.zeros(most, dtype=torch.int32, device=device)  # of all rows, one row after the other

    def put(self, batch: AttnBatch, rows: np.ndarray, lengths: np.ndarray, split: int, block_size: int) -> np.ndarray:
        """Everything about `rows` of the batch but query_start; returns where the pages of each begin, and the end.

        `indptr` [R + 2] counts from 0 again behind the first `split` rows. Nothing is sent.
        """
        n, count = split, len(rows)
        starts, last = page_arrays(lengths, block_size)
        self.indptr.array[: n + 1] = starts[: n + 1]
        self.indptr.array[n + 1 : count + 2] = starts[n:] - starts[n]
        self.last_page.array[:count], self.lengths.array[:count] = last, lengths
        self._counts.array[:count] = np.diff(starts)
        self._cells.array[:count] = rows * batch.table.host.shape[1] - starts[:-1]
        return starts

    def push(self, batch: AttnBatch, count: int, num_pages: int) -> Tensor:
        """Sends everything about `count` rows; returns their pages [num_pages], in `pages`."""
        self._device.copy_(self._host, non_blocking=True)
        table = batch.table.push(batch.num_rows).reshape(-1)
        found = self.pages[:num_pages]
        cells = torch.repeat_interleave(self._cells.device[:count], self._counts.device[:count], output_size=num_pages)
        torch.index_select(table, 0, cells.add_(self._numbers[:num_pages]), out=found)
        return found


def page_arrays(lengths: np.ndarray, block_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Where the pages of each row begin in the list of all [R + 1], and how many tokens its last one has [R]."""
    counts = (lengths + (block_size - 1)) // block_size
    starts = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=starts[1:])
    return starts, lengths - (counts - 1) * block_size


def working_rows(batch: AttnBatch) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Numbers of the rows that have queries [R], how many each has, and their lengths.

    A row that fills a captured step up has no tokens: it reads the one that it has written to the null block.
    """
    queries = np.diff(batch.query_start.host[: batch.num_rows + 1].numpy())
    rows = np.flatnonzero(queries)
    return rows, queries[rows], np.maximum(batch.seq_len.host[: batch.num_rows].numpy()[rows], 1)

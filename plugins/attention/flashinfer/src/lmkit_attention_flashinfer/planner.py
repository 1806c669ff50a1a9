"""What flashinfer is told once per step: which rows go to which of its wrappers, and their pages.

Rows of one query go to a decode wrapper, the others to the prefill wrapper. Wrappers take a softmax scale when they
plan, but the layers give it when they run; so the plan says 1 and `run` passes it as `q_scale`, which multiplies it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from lmkit.api import AttnBatch, AttnNeed, Platform, StepLimits
from torch import Tensor

if TYPE_CHECKING:
    from flashinfer import BatchDecodeWithPagedKVCacheWrapper, BatchPrefillWithPagedKVCacheWrapper

WIDE = 128  # pages: rows with more are copied one by one
INT_WORKSPACE = 1 << 20  # bytes of a decode wrapper's own tables: some ten for each row and multiprocessor


@dataclass(slots=True)
class FlashInferPlan:
    slots: Tensor  # [T] int64
    num_decode: int  # tokens [0, num_decode) are decode rows
    num_prefill: int
    decode: BatchDecodeWithPagedKVCacheWrapper | None
    prefill: BatchPrefillWithPagedKVCacheWrapper


class Staged:
    """Integers on the host, pinned where there is a device to copy them to, and their place on that device.

    flashinfer copies some of them itself, from the host side. It must not be written again before they have arrived.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        host = torch.zeros(size, dtype=torch.int32)
        self.host = host if device.type == "cpu" else host.pin_memory()
        self.array = self.host.numpy()
        self.device = torch.zeros(size, dtype=torch.int32, device=device)

    def push(self, n: int) -> Tensor:
        """The first `n` on the device."""
        self.device[:n].copy_(self.host[:n], non_blocking=True)
        return self.device[:n]


class FlashInferPlanner:
    """Buffers are made once.

    A step of decode rows alone has its own wrapper for each number of rows, whose tensors keep their addresses, as a
    captured graph needs it.
    """

    capture = "decode"

    def __init__(self, need: AttnNeed, limits: StepLimits, platform: Platform, workspace: Tensor, kernels: str) -> None:
        from flashinfer import BatchDecodeWithPagedKVCacheWrapper, BatchPrefillWithPagedKVCacheWrapper

        self.need, self.workspace, self.kernels = need, workspace, kernels
        rows, device = limits.max_rows, workspace.device
        self.indptr = Staged(rows + 2, device)  # of decode rows, then of the others
        self.last_page = Staged(rows, device)
        self.query_start = Staged(rows + 1, device)  # of the others
        self.pages = Staged(rows * limits.max_blocks_per_row, device)
        self.uploaded = platform.event()  # behind the copies of the last plan: also of those that flashinfer makes
        self.tables = torch.empty(INT_WORKSPACE, dtype=torch.uint8, device=workspace.device)
        self.decoders: dict[int, BatchDecodeWithPagedKVCacheWrapper] = {}  # by number of rows
        # Tensor cores make the decode kernels accept any number of query heads per KV head.
        self.mixed = BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True, backend=kernels)
        self.prefill = BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend=kernels)

    def plan(self, batch: AttnBatch) -> FlashInferPlan:
        queries = np.diff(batch.query_start.host[: batch.num_rows + 1].numpy())
        # A row that fills a captured step up has no tokens: it reads the one that it has written to the null block.
        lengths = np.maximum(batch.seq_len.host[: batch.num_rows].numpy(), 1)
        rows, n = split_rows(queries, batch.num_decode_rows)
        starts, last = page_arrays(lengths[rows], self.need.block_size)
        m, middle = len(rows) - n, int(starts[n])
        self.uploaded.wait()
        put_pages(batch.table.host.numpy(), rows, starts, self.pages.array)
        self.indptr.array[: n + 1] = starts[: n + 1]
        self.indptr.array[n + 1 : n + m + 2] = starts[n:] - middle
        self.last_page.array[: n + m] = last
        pages = self.pages.push(int(starts[-1]))
        decode = None
        if n:
            decode = self.mixed if m else self._decoder(n)
            decode.plan(
                self.indptr.host[: n + 1],
                pages[:middle],
                self.last_page.host[:n],
                *self._heads(),
                **self._common(),
            )
        if m:
            self.query_start.array[1 : m + 1] = np.cumsum(queries[rows[n:]])
            self.prefill.plan(
                self.query_start.host[: m + 1], self.indptr.host[n + 1 : n + m + 2], pages[middle:],
                self.last_page.host[n : n + m], *self._heads(), causal=self.need.causal, **self._common(),
            )  # fmt: skip
        self.uploaded.record()
        return FlashInferPlan(batch.slots.push(batch.num_tokens), n, batch.num_tokens - n, decode, self.prefill)

    def _decoder(self, num_rows: int) -> BatchDecodeWithPagedKVCacheWrapper:
        from flashinfer import BatchDecodeWithPagedKVCacheWrapper

        if num_rows not in self.decoders:
            wrapper = BatchDecodeWithPagedKVCacheWrapper(
                self.workspace,
                "NHD",
                use_cuda_graph=True,
                use_tensor_cores=True,
                paged_kv_indptr_buffer=self.indptr.device[: num_rows + 1],
                paged_kv_indices_buffer=self.pages.device,
                paged_kv_last_page_len_buffer=self.last_page.device[:num_rows],
                backend=self.kernels,
            )
            wrapper.reset_workspace_buffer(self.workspace, self.tables)  # one step is planned at a time
            self.decoders[num_rows] = wrapper
        return self.decoders[num_rows]

    def _heads(self) -> tuple[int, int, int, int]:
        need = self.need
        return need.num_q_heads, need.num_kv_heads, need.head_dim, need.block_size

    def _common(self) -> dict[str, Any]:
        need = self.need
        return {
            "sm_scale": 1.0,
            "window_left": -1 if need.window is None else need.window - 1,  # flashinfer does not count the token itself
            "logits_soft_cap": need.softcap,
            "q_data_type": getattr(torch, need.dtype),
            "kv_data_type": getattr(torch, need.kv_dtype),
        }


def split_rows(queries: np.ndarray, num_decode_rows: int) -> tuple[np.ndarray, int]:
    """Numbers of the rows that have queries, and how many of them, from the first, the decode wrapper takes.

    It takes one query per row: with drafts among the decode rows, all are prefill rows.
    """
    rows = np.flatnonzero(queries)
    n = int(np.searchsorted(rows, num_decode_rows))
    return rows, n if (queries[rows[:n]] == 1).all() else 0


def page_arrays(lengths: np.ndarray, block_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Where the pages of each row begin in the list of all [R + 1], and how many tokens its last one has [R]."""
    counts = (lengths + (block_size - 1)) // block_size
    starts = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=starts[1:])
    return starts, lengths - (counts - 1) * block_size


def put_pages(table: np.ndarray, rows: np.ndarray, starts: np.ndarray, out: np.ndarray) -> None:
    """Writes the pages of `rows` of the block table one after the other; those of row i begin at starts[i].

    Short rows are written at once. Where one is long, that would look at as many places for each of them.
    """
    counts = np.diff(starts)
    width = int(counts.max(initial=0))
    if width <= WIDE:
        out[: starts[-1]] = table[rows, :width][np.arange(width) < counts[:, None]]
        return
    for row, start, count in zip(rows.tolist(), starts.tolist(), counts.tolist(), strict=False):
        out[start : start + count] = table[row, :count]

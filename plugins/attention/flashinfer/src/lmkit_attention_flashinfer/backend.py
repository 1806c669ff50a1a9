"""Paged attention by flashinfer. KV of a layer: [num_blocks, 2, block_size, num_kv_heads, head_dim], K then V.

A step is planned twice: rows of one query go to the decode wrapper, the others to the prefill wrapper. Wrappers take a
softmax scale when they plan, but the layers give it when they run; so the plan says 1 and `run` passes it as `q_scale`,
which multiplies it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from lmkit.api import AttnBatch, AttnNeed, DeviceInfo, Platform, StepLimits
from torch import Tensor

if TYPE_CHECKING:
    from flashinfer import BatchDecodeWithPagedKVCacheWrapper, BatchPrefillWithPagedKVCacheWrapper

MIB = 1 << 20


@dataclass(slots=True)
class Pages:
    """The pages of some rows as flashinfer reads them; index arrays on the host, pages on the device."""

    indptr: Tensor  # [R + 1] int32
    indices: Tensor  # [pages] int32, on the device
    last_page: Tensor  # [R] int32, tokens in the last page


@dataclass(slots=True)
class FlashInferPlan:
    slots: Tensor  # [T] int64
    num_decode: int  # tokens [0, num_decode) are decode rows
    num_prefill: int
    decode: BatchDecodeWithPagedKVCacheWrapper
    prefill: BatchPrefillWithPagedKVCacheWrapper


class FlashInferPlanner:
    capture = "none"

    def __init__(self, need: AttnNeed, device: torch.device, workspace: Tensor, kernels: str) -> None:
        from flashinfer import BatchDecodeWithPagedKVCacheWrapper, BatchPrefillWithPagedKVCacheWrapper

        self.need, self.device = need, device
        # Tensor cores make the decode kernels accept any number of query heads per KV head.
        self.decode = BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True, backend=kernels)
        self.prefill = BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend=kernels)

    def plan(self, batch: AttnBatch) -> FlashInferPlan:
        starts = batch.query_start.host[: batch.num_rows + 1]
        queries = starts[1:] - starts[:-1]
        decode_rows, prefill_rows = split_rows(queries, batch.seq_len.host[: batch.num_rows], batch.num_decode_rows)
        if len(decode_rows):
            pages = self._pages(batch, decode_rows)
            self.decode.plan(
                pages.indptr, pages.indices, pages.last_page, *self._heads(), self.need.block_size, **self._common()
            )
        if len(prefill_rows):
            pages = self._pages(batch, prefill_rows)
            query_start = torch.zeros(len(prefill_rows) + 1, dtype=torch.int32)
            torch.cumsum(queries[prefill_rows], 0, dtype=torch.int32, out=query_start[1:])
            self.prefill.plan(
                query_start,
                pages.indptr,
                pages.indices,
                pages.last_page,
                *self._heads(),
                self.need.block_size,
                causal=self.need.causal,
                **self._common(),
            )
        num_decode = len(decode_rows)
        slots = batch.slots.push(batch.num_tokens)
        return FlashInferPlan(slots, num_decode, batch.num_tokens - num_decode, self.decode, self.prefill)

    def _heads(self) -> tuple[int, int, int]:
        return self.need.num_q_heads, self.need.num_kv_heads, self.need.head_dim

    def _common(self) -> dict[str, Any]:
        need = self.need
        return {
            "sm_scale": 1.0,
            "window_left": -1 if need.window is None else need.window - 1,  # flashinfer does not count the token itself
            "logits_soft_cap": need.softcap,
            "q_data_type": getattr(torch, need.dtype),
            "kv_data_type": getattr(torch, need.kv_dtype),
        }

    def _pages(self, batch: AttnBatch, rows: Tensor) -> Pages:
        indptr, indices, last_page = page_arrays(
            batch.table.host, batch.seq_len.host[: batch.num_rows], rows, self.need.block_size
        )
        return Pages(indptr, indices.to(self.device, non_blocking=True), last_page)


class FlashInferAttention:
    """AttentionBackend over flashinfer's paged wrappers."""

    name = "flashinfer"

    def __init__(self, workspace_mb: int = 128, kernels: str = "auto") -> None:
        self._workspace_mb, self._kernels = workspace_mb, kernels
        self._workspace: dict[torch.device, Tensor] = {}  # shared by all planners: only used while a kernel runs

    def can_run(self, need: AttnNeed, device: DeviceInfo) -> str | None:
        if need.mla or need.sinks or need.alibi:
            return "mla, sinks and alibi are not supported"
        if need.v_head_dim not in (None, need.head_dim):
            return f"v_head_dim {need.v_head_dim} differs from head_dim {need.head_dim}"
        if need.num_q_heads % need.num_kv_heads:
            return f"{need.num_q_heads} query heads are not a multiple of {need.num_kv_heads} KV heads"
        return None

    def block_sizes(self, need: AttnNeed) -> tuple[int, ...]:
        return (16, 32, 64, 8, 1)

    def kv_shape(self, need: AttnNeed, num_blocks: int) -> tuple[int, ...]:
        return (num_blocks, 2, need.block_size, need.num_kv_heads, need.head_dim)

    def planner(self, need: AttnNeed, limits: StepLimits, platform: Platform) -> FlashInferPlanner:
        device = platform.buffer((1,), torch.int32).device.device
        if device not in self._workspace:
            self._workspace[device] = torch.zeros(self._workspace_mb * MIB, dtype=torch.uint8, device=device)
        return FlashInferPlanner(need, device, self._workspace[device], self._kernels)

    def write_kv(self, k: Tensor, v: Tensor, kv: Tensor, slots: Tensor) -> None:
        """A slot of -1 rewrites the null block with what it holds: no synchronisation, and nothing changes."""
        block_size = kv.shape[2]
        skipped = (slots < 0)[:, None, None]
        slots = slots.clamp(min=0)
        block, offset = slots // block_size, slots % block_size
        for part, value in ((kv[:, 0], k), (kv[:, 1], v)):
            part[block, offset] = torch.where(skipped, part[block, offset], value.to(kv.dtype))

    def forward(self, q: Tensor, kv: Tensor, plan: FlashInferPlan, scale: float, out: Tensor) -> None:
        n, m = plan.num_decode, plan.num_prefill
        if n:
            plan.decode.run(q[:n], kv, q_scale=scale, out=out[:n])
        if m:
            plan.prefill.run(q[n : n + m], kv, q_scale=scale, out=out[n : n + m])


def split_rows(queries: Tensor, lengths: Tensor, num_decode_rows: int) -> tuple[Tensor, Tensor]:
    """Row numbers for the decode and the prefill wrapper; rows without queries or tokens go to neither.

    The decode wrapper takes one query per row: with drafts among the decode rows, all rows are prefill rows.
    """
    live = ((queries > 0) & (lengths > 0)).nonzero().flatten()
    is_decode = live < num_decode_rows
    if bool((queries[live[is_decode]] > 1).any()):
        return live[:0], live
    return live[is_decode], live[~is_decode]


def page_arrays(table: Tensor, lengths: Tensor, rows: Tensor, block_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """indptr [R + 1], pages [indptr[-1]] and tokens in the last page [R], all int32, of `rows` of the block table."""
    lengths = lengths[rows].long()
    counts = (lengths + block_size - 1) // block_size
    indptr = torch.zeros(len(rows) + 1, dtype=torch.int32)
    torch.cumsum(counts, 0, dtype=torch.int32, out=indptr[1:])
    column = torch.arange(table.shape[1])
    indices = table[rows][column < counts[:, None]].int()
    return indptr, indices, (lengths - (counts - 1) * block_size).int()

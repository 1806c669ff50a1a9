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

from lmkit_attention_flashinfer.pages import StepIntegers, working_rows

if TYPE_CHECKING:
    from flashinfer import BatchDecodeWithPagedKVCacheWrapper, BatchPrefillWithPagedKVCacheWrapper

INT_WORKSPACE = 1 << 20  # bytes of a decode wrapper's own tables: some ten for each row and multiprocessor


@dataclass(slots=True)
class FlashInferPlan:
    slots: Tensor  # [T] int64
    num_decode: int  # tokens [0, num_decode) are decode rows
    num_prefill: int
    decode: BatchDecodeWithPagedKVCacheWrapper | None
    prefill: BatchPrefillWithPagedKVCacheWrapper


class FlashInferPlanner:
    """Buffers are made once.

    A step of decode rows alone has its own wrapper for each number of rows, whose tensors keep their addresses, as a
    captured graph needs it.
    """

    capture = "decode"

    def __init__(
        self, need: AttnNeed, limits: StepLimits, platform: Platform, workspace: Tensor, kernels: str, decoding: str
    ) -> None:
        """flashinfer's kernel family for prompts, and that for decode rows."""
        from flashinfer import BatchDecodeWithPagedKVCacheWrapper, BatchPrefillWithPagedKVCacheWrapper

        self.need, self.workspace, self.decoding = need, workspace, decoding
        self.integers = StepIntegers(limits, workspace.device)
        self.uploaded = platform.event()  # behind the copies of the last plan: also of those that flashinfer makes
        self.tables = torch.empty(INT_WORKSPACE, dtype=torch.uint8, device=workspace.device)
        self.decoders: dict[int, BatchDecodeWithPagedKVCacheWrapper] = {}  # by number of rows
        # Tensor cores make the decode kernels accept any number of query heads per KV head.
        self.mixed = BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True, backend=decoding)
        self.prefill = BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend=kernels)

    def plan(self, batch: AttnBatch) -> FlashInferPlan:
        rows, queries, lengths = working_rows(batch)
        n = decode_rows(rows, queries, batch.num_decode_rows)
        m, sent = len(rows) - n, self.integers
        self.uploaded.wait()
        starts = sent.put(batch, rows, lengths, n, self.need.block_size)
        sent.query_start.array[1 : m + 1] = np.cumsum(queries[n:])
        pages, middle = sent.push(batch, n + m, int(starts[-1])), int(starts[n])
        decode = self._plan_decode(n, pages[:middle], alone=not m) if n else None
        if m:
            self.prefill.plan(
                sent.query_start.host[: m + 1], sent.indptr.host[n + 1 : n + m + 2], pages[middle:],
                sent.last_page.host[n : n + m], *self._heads(), causal=self.need.causal, **self._common(),
            )  # fmt: skip
        self.uploaded.record()
        return FlashInferPlan(batch.slots.push(batch.num_tokens), n, batch.num_tokens - n, decode, self.prefill)

    def _plan_decode(self, n: int, pages: Tensor, alone: bool) -> BatchDecodeWithPagedKVCacheWrapper:
        """`alone`: the step may be captured."""
        from flashinfer import fast_decode_plan

        sent, seen = self.integers, n in self.decoders
        wrapper = self._decoder(n) if alone else self.mixed
        told = (sent.indptr.host[: n + 1], pages, sent.last_page.host[:n], *self._heads())
        if alone and seen:  # its tensors are parts of what has been sent: nothing more is copied
            fast_decode_plan(wrapper, *told, **self._common(), global_override_indptr_cpu=told[0])
        else:
            wrapper.plan(*told, **self._common())
        return wrapper

    def _decoder(self, num_rows: int) -> BatchDecodeWithPagedKVCacheWrapper:
        from flashinfer import BatchDecodeWithPagedKVCacheWrapper

        if num_rows not in self.decoders:
            wrapper = BatchDecodeWithPagedKVCacheWrapper(
                self.workspace,
                "NHD",
                use_cuda_graph=True,
                use_tensor_cores=True,
                paged_kv_indptr_buffer=self.integers.indptr.device[: num_rows + 1],
                paged_kv_indices_buffer=self.integers.pages,
                paged_kv_last_page_len_buffer=self.integers.last_page.device[:num_rows],
                backend=self.decoding,
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


def decode_rows(rows: np.ndarray, queries: np.ndarray, num_decode_rows: int) -> int:
    """How many of `rows`, from the first, the decode wrapper takes.

    It takes one query per row: with drafts among the decode rows, all are prefill rows.
    """
    n = int(np.searchsorted(rows, num_decode_rows))
    return n if (queries[:n] == 1).all() else 0

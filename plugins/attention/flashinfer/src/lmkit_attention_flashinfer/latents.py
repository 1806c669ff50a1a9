"""Latent attention (MLA): one wrapper of flashinfer takes rows of any number of queries.

Its wrapper takes the softmax scale when it plans. The layers give theirs when they run, all the same one, so the first
layer of the first step has it planned again with that.
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
    from flashinfer.mla import BatchMLAPagedAttentionWrapper


@dataclass(slots=True)
class LatentPlan:
    slots: Tensor  # [T] int64
    wrapper: BatchMLAPagedAttentionWrapper | None  # None: no row has queries
    told: dict[str, Any]  # of its plan
    owner: LatentPlanner

    def run(self, q: Tensor, kv: Tensor, scale: float, out: Tensor) -> None:
        """q [T, H, Dc + Dr], kv [pages, page size, Dc + Dr], out [T, H, Dc]."""
        if self.wrapper is None:
            return
        if scale != self.owner.scale:
            self.owner.rescale(self, scale)
        if self.owner.metadata is not None:
            self.wrapper.run(query=q, kv_cache=kv, out=out)
            return
        size = self.owner.sizes["head_dim_ckv"]
        self.wrapper.run(
            q_nope=q[..., :size], q_pe=q[..., size:], ckv_cache=kv[..., :size], kpe_cache=kv[..., size:], out=out
        )


class LatentPlanner:
    """As FlashInferPlanner; a step of decode rows alone has a wrapper for each number of rows here, too."""

    capture = "decode"

    def __init__(self, need: AttnNeed, limits: StepLimits, platform: Platform, workspace: Tensor, kernels: str) -> None:
        from flashinfer import mla

        assert need.v_head_dim is not None
        self.need, self.workspace, self.kernels, self.scale = need, workspace, kernels, 1.0
        self.sizes = {"head_dim_ckv": need.v_head_dim, "head_dim_kpe": need.head_dim - need.v_head_dim}
        self.integers = StepIntegers(limits, workspace.device)
        self.uploaded = platform.event()
        self.decoders: dict[int, BatchMLAPagedAttentionWrapper] = {}  # by number of rows
        self.mixed = mla.BatchMLAPagedAttentionWrapper(workspace, backend=kernels)
        self.metadata: Any = getattr(mla, "MLAPlanMetadata", None)  # what later releases than 0.6 want to be told in

    def plan(self, batch: AttnBatch) -> LatentPlan:
        rows, queries, lengths = working_rows(batch)
        n, sent = len(rows), self.integers
        if not n:
            return LatentPlan(batch.slots.push(batch.num_tokens), None, {}, self)
        self.uploaded.wait()
        starts = sent.put(batch, rows, lengths, n, self.need.block_size)
        sent.query_start.array[1 : n + 1] = np.cumsum(queries)
        told = {
            "qo_indptr": sent.query_start.host[: n + 1],
            "kv_indptr": sent.indptr.host[: n + 1],
            "kv_indices": sent.push(batch, n, int(starts[-1])),
            "kv_len_arr": sent.lengths.host[:n],
        }
        decode = batch.num_decode_rows == batch.num_rows and bool((queries == 1).all())
        plan = LatentPlan(batch.slots.push(batch.num_tokens), self._decoder(n) if decode else self.mixed, told, self)
        self._tell(plan)
        return plan

    def rescale(self, plan: LatentPlan, scale: float) -> None:
        self.uploaded.wait()
        self.scale = scale
        self._tell(plan)

    def _tell(self, plan: LatentPlan) -> None:
        need = self.need
        assert plan.wrapper is not None
        told = plan.told if self.metadata is None else {"metadata": self.metadata.csr(**plan.told)}
        plan.wrapper.plan(
            **told, **self.sizes, num_heads=need.num_q_heads, page_size=need.block_size, causal=need.causal,
            sm_scale=self.scale, q_data_type=getattr(torch, need.dtype), kv_data_type=getattr(torch, need.kv_dtype),
        )  # fmt: skip
        self.uploaded.record()

    def _decoder(self, num_rows: int) -> BatchMLAPagedAttentionWrapper:
        from flashinfer.mla import BatchMLAPagedAttentionWrapper

        if num_rows not in self.decoders:
            parts = self.integers
            self.decoders[num_rows] = BatchMLAPagedAttentionWrapper(
                self.workspace,
                use_cuda_graph=True,
                qo_indptr=parts.query_start.device[: num_rows + 1],
                kv_indptr=parts.indptr.device[: num_rows + 1],
                kv_indices=parts.pages,
                kv_len_arr=parts.lengths.device[:num_rows],
                backend=self.kernels,
            )
        return self.decoders[num_rows]

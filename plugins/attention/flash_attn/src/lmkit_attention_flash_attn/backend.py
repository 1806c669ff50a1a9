"""Paged attention by flash-attn. KV of a layer: [2, num_blocks, block_size, num_kv_heads, head_dim], K, then V.

Both generations read pages through a table of the rows and take queries that end where the keys end. The second wants
as many queries of each row of a call, so rows of one query go together and each other row by itself; the third takes
rows of any number of queries at once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from lmkit.api import AttnBatch, AttnNeed, DeviceInfo, Platform, PluginError, StepLimits
from torch import Tensor


@dataclass(slots=True)
class FlashPlan:
    """On the device, but for the numbers. Of a decode step every tensor lies where it lay in the step before."""

    slots: Tensor  # [T] int64
    query_start: Tensor  # [R + 1] int32
    seq_len: Tensor  # [R] int32
    table: Tensor  # [R, max_blocks] int32
    num_single: int  # rows [0, num_single) have one query each
    others: list[tuple[int, int, int]]  # row, its first token and one behind its last, of each other row with tokens
    num_tokens: int
    max_query: int
    owner: FlashPlanner


class FlashPlanner:
    capture: Literal["none", "decode", "any"] = "decode"

    def __init__(self, need: AttnNeed, attend: Callable[..., Tensor], device: torch.device) -> None:
        self.need, self.attend = need, attend
        self.slopes = torch.tensor(need.slopes, device=device) if need.alibi else None

    def plan(self, batch: AttnBatch) -> FlashPlan:
        n = batch.num_rows
        starts = batch.query_start.host[: n + 1].numpy()
        counts, decode = np.diff(starts), batch.num_decode_rows
        single = decode if (counts[:decode] == 1).all() else 0
        others = [(row, int(starts[row]), int(starts[row + 1])) for row in range(single, n) if counts[row]]
        return FlashPlan(
            slots=batch.slots.push(batch.num_tokens), query_start=batch.query_start.push(n + 1),
            seq_len=batch.seq_len.push(n), table=batch.table.push(n), num_single=single, others=others,
            num_tokens=batch.num_tokens, max_query=batch.max_query, owner=self,
        )  # fmt: skip


class FlashAttention2:
    """AttentionBackend over `flash_attn`."""

    name = "flash_attn"
    module: ClassVar[str] = "flash_attn"

    def can_run(self, need: AttnNeed, device: DeviceInfo) -> str | None:
        if need.mla or need.sinks:
            return "mla and sinks are not supported"
        if need.v_head_dim not in (None, need.head_dim):
            return f"v_head_dim {need.v_head_dim} differs from head_dim {need.head_dim}"
        if need.num_q_heads % need.num_kv_heads:
            return f"{need.num_q_heads} query heads are not a multiple of {need.num_kv_heads} KV heads"
        if not need.causal and (need.alibi or need.chunked):
            return "alibi and chunks are supported for causal attention only"
        return None

    def block_sizes(self, need: AttnNeed) -> tuple[int, ...]:
        return (256, 512)

    def kv_shape(self, need: AttnNeed, num_blocks: int) -> tuple[int, ...]:
        return (2, num_blocks, need.block_size, need.num_kv_heads, need.head_dim)

    def planner(self, need: AttnNeed, limits: StepLimits, platform: Platform) -> FlashPlanner:
        """Raises PluginError when flash-attn cannot be imported: it is built for one torch and one CUDA."""
        try:
            attend = import_module(self.module).flash_attn_with_kvcache
        except (ImportError, AttributeError, OSError) as e:
            raise PluginError(
                f"{self.module} cannot be imported: {e}",
                fix="install a build for this torch and its CUDA, or choose another with --attention",
            ) from e
        return FlashPlanner(need, attend, platform.buffer((1,), torch.int32).device.device)

    def write_kv(self, k: Tensor, v: Tensor, kv: Tensor, slots: Tensor) -> None:
        """A slot of -1 is one of the null block, which belongs to no row: nothing is read, and nobody waits."""
        slots = slots.clamp(min=0)
        for part, value in zip(kv, (k, v), strict=True):
            part.view(-1, *part.shape[2:]).index_copy_(0, slots, value.to(kv.dtype))

    def forward(self, q: Tensor, kv: Tensor, plan: FlashPlan, scale: float, out: Tensor) -> None:
        owner, n = plan.owner, plan.num_single
        how = {**told(owner.need), "alibi_slopes": owner.slopes, "softmax_scale": scale}
        rows = [(slice(0, n), q[:n].unsqueeze(1), out[:n].unsqueeze(1))] * bool(n)
        rows += [(slice(row, row + 1), q[start:end][None], out[start:end][None]) for row, start, end in plan.others]
        for row, queries, result in rows:
            pages = {"cache_seqlens": plan.seq_len[row], "block_table": plan.table[row]}
            result.copy_(owner.attend(queries, kv[0], kv[1], **pages, **how))


class FlashAttention3(FlashAttention2):
    """AttentionBackend over `flash_attn_interface`, which flash-attn-3 brings."""

    name = "flash_attn_3"
    module: ClassVar[str] = "flash_attn_interface"

    def forward(self, q: Tensor, kv: Tensor, plan: FlashPlan, scale: float, out: Tensor) -> None:
        if not plan.num_tokens:
            return
        need = plan.owner.need
        how: dict[str, Any] = {**told(need), "softmax_scale": scale}
        if need.chunked:
            how |= {"window_size": (-1, -1), "attention_chunk": need.window}
        result = plan.owner.attend(
            q, kv[0], kv[1], cache_seqlens=plan.seq_len, page_table=plan.table, cu_seqlens_q=plan.query_start,
            max_seqlen_q=plan.max_query, **how,
        )  # fmt: skip
        out.copy_(result)


def told(need: AttnNeed) -> dict[str, Any]:
    """What both are told of a need. flash-attn does not count the token itself among those of a window."""
    left = -1 if need.window is None else need.window - 1
    right = left if not need.causal else -1 if need.window is None else 0
    return {"causal": need.causal, "window_size": (left, right), "softcap": need.softcap or 0.0}

"""Paged attention by FlexAttention. KV of a layer: [num_blocks, block_size, num_kv_heads, head_dim + v_head_dim].

Compiled, its kernel reads the pages where they lie: the lists of blocks that it is given are those of the pages, and
the mask turns a place in memory into a position of the row. Not compiled, FlexAttention works out the scores of all
keys that it is given, so it is given a copy of the row's own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from lmkit.api import AttentionBackend, AttentionRequest, AttnNeed, AttnPlan, DeviceInfo, Platform, StepLimits
from torch import Tensor
from torch.nn.attention import flex_attention as flex
from torch.nn.attention.flex_attention import AuxRequest, BlockMask
from torch.nn.functional import pad

from lmkit_attention_flex.check import check
from lmkit_attention_flex.plan import TILE, FlexPlan, FlexPlanner, Task

VARIANTS = 64  # kernels that one process may compile: a few for each group of layers
Mod = Callable[..., Tensor]


class FlexAttention(AttentionBackend):
    name = "flex"

    def __init__(self) -> None:
        self.kernel: Any = None  # None: not compiled

    def can_run(self, need: AttnNeed, device: DeviceInfo) -> str | None:
        if refused := next(check(AttentionRequest(need=need, device=device)), None):
            return str(refused)
        if need.mla:
            return "latent attention (mla) is not implemented"
        if need.num_q_heads % need.num_kv_heads:
            return f"{need.num_q_heads} query heads are not a multiple of {need.num_kv_heads} KV heads"
        if not need.causal and need.alibi:
            return "alibi is defined for causal attention only"
        return None

    def block_sizes(self, need: AttnNeed) -> tuple[int, ...]:
        return (64, 128, 32, 16)

    def kv_shape(self, need: AttnNeed, num_blocks: int) -> tuple[int, ...]:
        width = need.head_dim + (need.v_head_dim or need.head_dim)
        return (num_blocks, need.block_size, need.num_kv_heads, width)

    def planner(self, need: AttnNeed, limits: StepLimits, platform: Platform) -> FlexPlanner:
        device = platform.buffer((1,), torch.int32).device.device
        if device.type != "cpu" and self.kernel is None:
            torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, VARIANTS)
            # Whole, so that one kernel too many is an error and not a fall back to what is not compiled.
            self.kernel = torch.compile(flex.flex_attention, fullgraph=True)
        return FlexPlanner(need, device)

    def write_kv(self, k: Tensor, v: Tensor, kv: Tensor, slots: Tensor) -> None:
        """A slot of -1 is one of the null block, which belongs to no row: nothing is read, and nobody waits."""
        places, slots = kv.view(-1, *kv.shape[2:]), slots.clamp(min=0)
        places[..., : k.shape[2]].index_copy_(0, slots, k.to(kv.dtype))
        places[..., k.shape[2] :].index_copy_(0, slots, v.to(kv.dtype))

    def forward(
        self, q: Tensor, kv: Tensor, plan: AttnPlan, scale: float, out: Tensor, sinks: Tensor | None = None
    ) -> None:
        assert isinstance(plan, FlexPlan)
        # A page's rest may hold what is no number, which a weight of 0 does not take out of a sum.
        kv.view(-1, *kv.shape[2:]).index_fill_(0, plan.fresh, 0)
        for task in plan.tasks:
            b, count = task.shape
            queries = q[task.tokens].view(b, count, *q.shape[1:]).transpose(1, 2)
            memory = kv if self.kernel else kv.index_select(0, task.pages.flatten())
            memory = memory.view(1 if self.kernel else b, -1, *kv.shape[2:]).transpose(1, 2)
            keys, values = memory[..., : q.shape[2]], memory[..., q.shape[2] :]
            if task.mask is None:
                task.mask = self._mask(task, plan.need, kv.shape[0])
            given = (queries, keys, values, _score(task, plan, self._places(task, plan.need)), task.mask, scale)
            if sinks is None:
                found = self._attend(*given, enable_gqa=True)
            else:
                found, aux = self._attend(*given, enable_gqa=True, return_aux=AuxRequest(lse=True))
                found = found * torch.sigmoid(aux.lse - sinks.view(-1, 1)).unsqueeze(-1).to(found.dtype)
            out[task.tokens] = found.transpose(1, 2).reshape(b * count, *out.shape[1:])

    def _attend(self, *given: Any, **more: Any) -> Any:
        if self.kernel is not None:
            size = given[4].BLOCK_SIZE[1]
            return self.kernel(*given, **more, kernel_options={"BLOCK_N": min(size, 64)})
        compiles, flex._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG = flex._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG, True
        try:  # else it is traced anew for every shape
            return flex.flex_attention(*given, **more)
        finally:
            flex._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG = compiles

    def _places(self, task: Task, need: AttnNeed) -> Mod:
        """From the number of a key to its position in row b; -1: the row does not have it."""
        size, base, order = need.block_size, task.base, task.order
        if order is None:
            return lambda b, key: base[b] + key

        def position(b: Tensor, key: Tensor) -> Tensor:
            page = order[b, key // size]
            return torch.where(page < 0, -1, page * size + key % size)

        return position

    def _mask(self, task: Task, need: AttnNeed, num_blocks: int) -> BlockMask:
        """Which keys each query sees, of all slots in memory or of the row's own."""
        b, count = task.shape
        size, width = need.block_size, task.pages.shape[1]
        (partly, some), (wholly, every) = task.partly, task.wholly
        if self.kernel is not None:
            some, every = (pad(pages, (0, num_blocks - width)) for pages in (some, every))  # the CPU wants it
            task.order = some.new_full((b, num_blocks), -1)
            task.order.scatter_(1, task.pages, task.numbers)
            width = num_blocks
        mask = _visible(task, need, self._places(task, need))
        shape = (count, width * size)
        return BlockMask.from_kv_blocks(
            partly, some, wholly, every, (TILE, size), mask, seq_lengths=shape, compute_q_blocks=False
        )


def _visible(task: Task, need: AttnNeed, places: Mod) -> Mod:
    """The mask as FlexAttention calls it."""
    first, length, window, causal, chunked = task.first, task.length, need.window, need.causal, need.chunked

    def visible(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        at, seen = first[b] + query, places(b, key)
        found = (seen >= 0) & (seen < length[b])
        if causal:
            found = found & (seen <= at)
        if window is not None:
            found = found & (seen > at - window) & (seen < at + window)
            if chunked:
                found = found & (seen // window == at // window)
        return found

    return visible


def _score(task: Task, plan: FlexPlan, places: Mod) -> Mod | None:
    """What becomes of a score before the softmax; None: it stays."""
    cap, slopes, first = plan.need.softcap, plan.slopes, task.first
    if cap is None and slopes is None:
        return None

    def score(x: Tensor, b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        if cap is not None:
            x = torch.tanh(x / cap) * cap
        if slopes is not None:
            x = x - slopes[h] * (first[b] + query - places(b, key))
        return x

    return score

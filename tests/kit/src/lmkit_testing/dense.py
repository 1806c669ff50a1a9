"""Attention written in the simplest way that can be right: the oracle of the attention kit, and what models run on
in the model kit. One row and one head at a time, in float64, no blocks kept apart."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from lmkit.api import AttentionBackend, AttnBatch, AttnNeed, AttnPlan, DeviceInfo, Platform, StepLimits
from torch import Tensor


def visible(need: AttnNeed, query: int, key: int) -> bool:
    """Whether the token at position `query` reads position `key`."""
    near = need.window is None or abs(query - key) < need.window
    if need.chunked and need.window is not None:
        near = query // need.window == key // need.window
    return near and (key <= query or not need.causal)


def slopes(num_heads: int) -> list[float]:
    """Alibi: heads of a power of two form a geometric series from 2^(-8/n); the rest interleave the next series."""
    power = 2 ** (num_heads.bit_length() - 1)
    series = [2 ** (-8 * (i + 1) / power) for i in range(power)]
    between = [2 ** (-8 * (i + 1) / (2 * power)) for i in range(2 * power)][::2]
    return series + between[: num_heads - power]


def attend(
    q: Tensor, k: Tensor, v: Tensor, start: int, need: AttnNeed, scale: float, sinks: Tensor | None = None
) -> Tensor:
    """q [Q, Hq, D] at positions start..start+Q-1, k [L, Hkv, D] and v [L, Hkv, Dv] -> [Q, Hq, Dv] float64."""
    q, k, v = q.double(), k.double(), v.double()
    num_q, heads, length, share = q.shape[0], q.shape[1], k.shape[0], q.shape[1] // k.shape[1]
    seen = torch.tensor([[visible(need, start + i, j) for j in range(length)] for i in range(num_q)], dtype=torch.bool)
    seen = seen.view(num_q, length)
    distance = torch.arange(start, start + num_q)[:, None] - torch.arange(length)
    out = torch.empty(num_q, heads, v.shape[-1], dtype=torch.float64)
    for head in range(heads):
        scores = q[:, head] @ k[:, head // share].T * scale
        if need.softcap is not None:
            scores = need.softcap * torch.tanh(scores / need.softcap)
        if need.alibi:
            scores = scores - need.alibi_scale * slopes(need.among[1] or heads)[need.among[0] + head] * distance
        scores = scores.masked_fill(~seen, -torch.inf)
        if sinks is not None:
            scores = torch.cat((scores, sinks[head].double().expand(num_q, 1)), 1)
        out[:, head] = scores.softmax(-1)[:, :length] @ v[:, head // share]
    return out


@dataclass(slots=True)
class DensePlan:
    slots: Tensor
    need: AttnNeed
    rows: list[tuple[int, int, int, list[int]]]  # first token, end, length, slot of each position


class DensePlanner:
    capture: Literal["none", "decode", "any"] = "none"

    def __init__(self, need: AttnNeed) -> None:
        self.need = need

    def plan(self, batch: AttnBatch) -> DensePlan:
        size, rows = self.need.block_size, []
        for r in range(batch.num_rows):
            first, end = (int(batch.query_start.host[r + i]) for i in (0, 1))
            length = int(batch.seq_len.host[r])
            table = batch.table.host[r].tolist()
            rows.append((first, end, length, [table[p // size] * size + p % size for p in range(length)]))
        return DensePlan(batch.slots.push(batch.num_tokens), self.need, rows)


class DenseAttention(AttentionBackend):
    """A slow, obvious backend over the same paged memory as any other."""

    name = "dense"

    def can_run(self, need: AttnNeed, device: DeviceInfo) -> str | None:
        return None

    def block_sizes(self, need: AttnNeed) -> tuple[int, ...]:
        return (16, 1)

    def kv_shape(self, need: AttnNeed, num_blocks: int) -> tuple[int, ...]:
        return (num_blocks, need.block_size, need.num_kv_heads, need.kv_width)

    def planner(self, need: AttnNeed, limits: StepLimits | None, platform: Platform | None) -> DensePlanner:
        return DensePlanner(need)

    def write_kv(self, k: Tensor, v: Tensor, kv: Tensor, slots: Tensor) -> None:
        flat = kv.view(-1, *kv.shape[2:])
        for token, slot in enumerate(slots.tolist()):
            if slot >= 0:
                flat[slot] = torch.cat((k[token], v[token]), -1)[..., : kv.shape[-1]].to(kv.dtype)

    def forward(
        self, q: Tensor, kv: Tensor, plan: AttnPlan, scale: float, out: Tensor, sinks: Tensor | None = None
    ) -> None:
        assert isinstance(plan, DensePlan)
        flat, dim = kv.view(-1, *kv.shape[2:]), q.shape[-1]
        for first, end, length, slots in plan.rows:
            if end == first or length == 0:
                continue
            low = 0 if plan.need.window is None else max(0, length - (end - first) - plan.need.window + 1)
            if plan.need.chunked and plan.need.window is not None:
                low -= low % plan.need.window  # what `attend` counts as 0 begins a chunk
            cached = flat[torch.tensor(slots[low:])]  # what lies before the window may have been given back
            need, start = plan.need, length - (end - first) - low
            keys, values = cached[..., :dim], cached[..., : need.v_head_dim] if need.mla else cached[..., dim:]
            out[first:end] = attend(q[first:end], keys, values, start, need, scale, sinks)

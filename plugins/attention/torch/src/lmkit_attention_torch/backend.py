"""Paged attention in plain torch. KV of a layer: [num_blocks, block_size, num_kv_heads, head_dim + v_head_dim].

With int8 each token and head has the bytes of two float32 scales behind its values: of the key, of the value. Where
values are the first part of keys, keys stand alone; the scales are those of the rest and of that part.
"""

from __future__ import annotations

import torch
from lmkit.api import AttnNeed, AttnPlan, DeviceInfo, Platform, StepLimits, TreeAttention, kv_scale_bytes
from torch import Tensor
from torch.nn import functional as F

from lmkit_attention_torch.plan import Task, TorchPlan, TorchPlanner

FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)


class TorchAttention(TreeAttention):
    name = "torch"

    def can_run(self, need: AttnNeed, device: DeviceInfo) -> str | None:
        if need.mla and not need.head_dim > (need.v_head_dim or need.head_dim):
            return f"values of {need.v_head_dim} entries are not a part of keys of {need.head_dim} (mla)"
        if need.num_q_heads % need.num_kv_heads:
            return f"{need.num_q_heads} query heads are not a multiple of {need.num_kv_heads} KV heads"
        if not need.causal and need.alibi:
            return "alibi is defined for causal attention only"
        return None

    def block_sizes(self, need: AttnNeed) -> tuple[int, ...]:
        return (16, *range(32, 1025, 16), *(size for size in range(1, 1025) if size % 16))

    def kv_shape(self, need: AttnNeed, num_blocks: int) -> tuple[int, ...]:
        return (num_blocks, need.block_size, need.num_kv_heads, need.kv_width + kv_scale_bytes(need.kv_dtype))

    def planner(self, need: AttnNeed, limits: StepLimits, platform: Platform) -> TorchPlanner:
        return TorchPlanner(need, platform.buffer((1,), torch.int32).device.device)

    def write_kv(self, k: Tensor, v: Tensor, kv: Tensor, slots: Tensor) -> None:
        flat = _bytes(kv).view(-1, *kv.shape[2:])
        if slots.numel() and int(slots.min()) < 0:
            keep = slots >= 0
            k, v, slots = k[keep], v[keep], slots[keep]
        dim, v_dim = k.shape[-1], v.shape[-1]
        if kv.shape[-1] - (8 if kv.dtype == torch.int8 else 0) == dim:  # keys alone, of which values are a part
            k, v = k.split((v_dim, dim - v_dim), dim=-1)
        if kv.dtype == torch.int8:
            (k, k_scale), (v, v_scale) = quantize(k), quantize(v)
            flat.index_copy_(0, slots, torch.cat((k, v, k_scale, v_scale), dim=-1))
            return
        flat[..., : k.shape[-1]].index_copy_(0, slots, _stored(k, kv.dtype))
        flat[..., k.shape[-1] :].index_copy_(0, slots, _stored(v, kv.dtype))

    def move_kv(self, kv: Tensor, need: AttnNeed, sources: Tensor, targets: Tensor) -> None:
        flat = _bytes(kv).view(len(kv), -1, *kv.shape[3:])
        flat.index_copy_(1, targets, flat.index_select(1, sources))

    def forward(
        self, q: Tensor, kv: Tensor, plan: AttnPlan, scale: float, out: Tensor, sinks: Tensor | None = None
    ) -> None:
        assert isinstance(plan, TorchPlan)
        flat = _bytes(kv).view(-1, *kv.shape[2:])
        special = plan.need.softcap is not None or plan.need.sinks or plan.need.alibi
        first = out.shape[-1] if plan.need.mla else q.shape[-1]  # entries under the first scale
        for task in plan.tasks:
            cached = flat.index_select(0, task.index).view(kv.dtype)
            cached = dequantize(cached, first, q.dtype) if kv.dtype == torch.int8 else cached.to(q.dtype)
            out[task.tokens] = (
                _dense(q[task.tokens], cached, task, plan, scale, sinks)
                if special
                else _fused(q[task.tokens], cached, task, scale)[..., : out.shape[-1]]
            )


def _bytes(kv: Tensor) -> Tensor:
    """Float8 memory as what torch can index; other memory as it is."""
    return kv.view(torch.uint8) if kv.dtype in FLOAT8 else kv


def _stored(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Keys or values as `_bytes` of memory of `dtype` hold them: what is too large for float8 becomes its largest."""
    if dtype not in FLOAT8:
        return x.to(dtype)
    largest = torch.finfo(dtype).max
    return x.clamp(-largest, largest).to(dtype).view(torch.uint8)


def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [..., D] as codes [..., D] int8, and the bytes [..., 4] of their float32 scales."""
    x = x.float()
    largest = x.abs().amax(-1, keepdim=True)
    inverse = (largest.reciprocal() * 127).clamp(max=torch.finfo(torch.float32).max)  # of a head of zeros
    codes = (x * inverse).round().clamp(-127, 127).to(torch.int8)
    return codes, (largest / 127).view(torch.int8)


def dequantize(cached: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    """Codes and scales of `dim` entries, and of those behind them: [..., D + Dv + 8] -> [..., D + Dv]."""
    scales = cached[..., -8:].contiguous().view(torch.float32)
    keys, values = cached[..., :dim], cached[..., dim:-8]
    return torch.cat((keys * scales[..., :1], values * scales[..., 1:]), dim=-1).to(dtype)


def _fused(q: Tensor, cached: Tensor, task: Task, scale: float) -> Tensor:
    """torch's scaled_dot_product_attention. q [B * Q, Hq, D], cached [B * L, Hkv, D + Dv] -> [B * Q, Hq, Dv].

    Where keys stand alone they are the values too, of which the caller wants the first part: torch's fast paths take
    sizes that are equal, and no copy is made.
    """
    b, num_q, length = task.shape
    heads, dim = q.shape[1:]
    num_kv = cached.shape[1]
    cached = cached.view(b, length, num_kv, -1).transpose(1, 2)
    keys, values = cached[..., :dim], cached[..., dim:] if cached.shape[-1] > dim else cached
    bias = task.bias(q.dtype)
    if bias is not None:
        bias = bias[:, None]
    if num_q == 1:  # the query heads of one KV head stand as queries: KV is read once
        queries = q.view(b, num_kv, heads // num_kv, dim)
        return F.scaled_dot_product_attention(queries, keys, values, bias, scale=scale).reshape(b, heads, -1)
    if not q.stride(1):  # one head for all: cuDNN lays its result out like that, and refuses it then
        q = q.contiguous()
    queries = q.view(b, num_q, heads, dim).transpose(1, 2)
    if num_kv == 1:  # a view of them stands for the keys of all heads, which torch would copy
        keys, values = (x.expand(-1, heads, -1, -1) for x in (keys, values))
    result = F.scaled_dot_product_attention(
        queries, keys, values, bias, is_causal=task.is_causal, scale=scale, enable_gqa=keys.shape[1] != heads
    )
    return result.transpose(1, 2).reshape(b * num_q, heads, -1)


def _dense(q: Tensor, cached: Tensor, task: Task, plan: TorchPlan, scale: float, sinks: Tensor | None) -> Tensor:
    """The same in float32 step by step, with softcap, alibi and sinks."""
    b, num_q, length = task.shape
    heads, dim = q.shape[1:]
    num_kv = cached.shape[1]
    queries = q.float().view(b, num_q, num_kv, heads // num_kv, dim)
    cached = cached.float().view(b, length, num_kv, -1)
    keys, values = cached[..., :dim], cached[..., : plan.need.v_head_dim] if plan.need.mla else cached[..., dim:]
    scores = torch.einsum("bqhgd,blhd->bhgql", queries, keys) * scale
    if plan.need.softcap is not None:
        scores = torch.tanh(scores / plan.need.softcap) * plan.need.softcap
    if plan.slopes is not None and task.distance is not None:
        scores = scores - plan.slopes.view(num_kv, -1, 1, 1) * task.distance[:, None, None]
    bias = task.bias(torch.float32)
    if bias is not None:
        scores = scores + bias[:, None, None]
    if sinks is not None:
        extra = sinks.float().view(1, num_kv, -1, 1, 1).expand(b, -1, -1, num_q, 1)
        scores = torch.cat((scores, extra), dim=-1)
    probs = scores.softmax(dim=-1)[..., :length]
    return torch.einsum("bhgql,blhd->bqhgd", probs, values).reshape(b * num_q, heads, -1).to(q.dtype)

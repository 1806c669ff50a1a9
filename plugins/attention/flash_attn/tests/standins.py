"""flash_attn_with_kvcache of both generations: names, defaults and checks as there, dense attention as the kernel."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

FA2 = """q k_cache v_cache k=None v=None rotary_cos=None rotary_sin=None cache_seqlens=None cache_batch_idx=None
cache_leftpad=None block_table=None softmax_scale=None causal=False window_size=(-1,-1) softcap=0.0
rotary_interleaved=True alibi_slopes=None num_splits=0 return_softmax_lse=False"""
FA3 = """q k_cache v_cache k=None v=None qv=None rotary_cos=None rotary_sin=None cache_seqlens=None cache_batch_idx=None
cache_leftpad=None page_table=None cu_seqlens_q=None cu_seqlens_k_new=None max_seqlen_q=None rotary_seqlens=None
q_descale=None k_descale=None v_descale=None softmax_scale=None causal=False window_size=(-1,-1) attention_chunk=0
softcap=0.0 rotary_interleaved=True scheduler_metadata=None num_splits=0 pack_gqa=None sm_margin=0
return_softmax_lse=False"""


def signature(text: str) -> inspect.Signature:
    """The parameters of one of them, all by position or name."""
    scope: dict[str, Any] = {}
    exec(f"def f({', '.join(text.split())}): pass", scope)  # a constant of this file
    return inspect.signature(scope["f"])


def function(text: str, kernel: Callable[[dict[str, Any]], Tensor]) -> Callable[..., Tensor]:
    """A function with those parameters, and no others, over `kernel`."""
    parameters = signature(text)

    def attend(*given: Any, **named: Any) -> Tensor:
        bound = parameters.bind(*given, **named)
        bound.apply_defaults()
        return kernel(bound.arguments)

    return attend


def checked(a: dict[str, Any], table: Tensor, rows: int) -> None:
    """What both generations check of operands, whatever the shape of q."""
    q, k, v, lengths = a["q"], a["k_cache"], a["v_cache"], a["cache_seqlens"]
    assert a["k"] is a["v"] is a["cache_batch_idx"] is a["cache_leftpad"] is None
    assert q.dtype in (torch.float16, torch.bfloat16)
    assert q.dtype == k.dtype == v.dtype
    assert k.stride(-1) == v.stride(-1) == 1
    assert k.shape == v.shape
    heads, size = q.shape[-2:]
    assert k.shape[-1] == size
    assert size <= 256
    assert size % 8 == 0, "the second pads the whole cache, the third refuses"
    assert heads % k.shape[2] == 0
    assert (table.dtype, table.stride(-1), table.dim(), len(table)) == (torch.int32, 1, 2, rows)
    assert (lengths.dtype, lengths.shape) == (torch.int32, (rows,))
    assert lengths.is_contiguous()
    assert rows > 0


def row(a: dict[str, Any], q: Tensor, pages: Tensor, length: int) -> Tensor:
    """Dense attention of queries [Q, Hq, D] that end where the keys end. Keys behind `length` are not read."""
    if not length:
        return torch.zeros_like(q)
    size, kv_heads, dim = a["k_cache"].shape[1:]
    ids = pages[: -(-length // size)].long()
    keys, values = (a[name][ids].flatten(0, 1)[:length].float() for name in ("k_cache", "v_cache"))
    scale = dim**-0.5 if a["softmax_scale"] is None else a["softmax_scale"]
    scores = torch.einsum("qhgd,lhd->hgql", q.float().view(len(q), kv_heads, q.shape[1] // kv_heads, dim), keys) * scale
    if a["softcap"] > 0:
        scores = torch.tanh(scores / a["softcap"]) * a["softcap"]
    at, key = torch.arange(length - len(q), length)[:, None], torch.arange(length)
    if a.get("alibi_slopes") is not None:
        slopes = a["alibi_slopes"]
        assert (slopes.dtype, slopes.shape, slopes.stride(-1)) == (torch.float32, (q.shape[1],), 1)
        scores = scores - slopes.view(kv_heads, -1, 1, 1) * (at - key).abs()
    left, right = a["window_size"]
    right = 0 if a["causal"] else right
    hidden = torch.zeros_like(at - key, dtype=torch.bool)
    if left >= 0:
        hidden |= key < at - left
    if right >= 0:
        hidden |= key > at + right
    if a.get("attention_chunk"):
        hidden |= key // a["attention_chunk"] != at // a["attention_chunk"]
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    return torch.einsum("hgql,lhd->qhgd", weights, values).reshape(q.shape).to(q.dtype)


def second(a: dict[str, Any]) -> Tensor:
    """The compiled part of flash_attn: q [rows, queries, heads, size]."""
    q, table = a["q"], a["block_table"]
    assert q.dim() == 4
    assert q.shape[1], "a launch of no blocks"
    checked(a, table, len(q))
    assert a["k_cache"].shape[1] % 256 == 0, "Paged KV cache block size must be divisible by 256"
    lengths = a["cache_seqlens"].tolist()
    return torch.stack([row(a, x, pages, n) for x, pages, n in zip(q, table, lengths, strict=True)])


def third(a: dict[str, Any]) -> Tensor:
    """The compiled part of flash_attn_interface: q [tokens, heads, size], cut by cu_seqlens_q."""
    q, table, starts = a["q"], a["page_table"], a["cu_seqlens_q"]
    assert q.dim() == 3
    assert starts.dtype == torch.int32
    assert starts.is_contiguous()
    checked(a, table, len(starts) - 1)
    assert int(starts[-1]) == len(q)
    assert a["max_seqlen_q"] >= int(starts.diff().max()), "a row is longer than the launch is wide"
    parts = q.split(starts.diff().tolist())
    lengths = a["cache_seqlens"].tolist()
    return torch.cat([row(a, x, pages, n) for x, pages, n in zip(parts, table, lengths, strict=True)])


with_kvcache_2, with_kvcache_3 = function(FA2, second), function(FA3, third)

"""Paged attention by the native kernels of the CPU platform. The memory layout stands in its `csrc/attention.h`.

KV of a layer: [num_blocks, num_kv_heads, block_size * kv_width]; with int8 also 8 bytes of scales for each position.
"""

from __future__ import annotations

from ctypes import Structure, addressof, c_float, c_int32, c_int64, c_void_p
from typing import Literal

import torch
from lmkit.api import (
    AttnBatch,
    AttnNeed,
    AttnPlan,
    DeviceInfo,
    EngineError,
    Platform,
    PluginError,
    RotatingAttention,
    StepLimits,
    TreeAttention,
    kv_scale_bytes,
)
from lmkit_platform_cpu.native import FIX, MISSING, Args, Native
from torch import Tensor

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # as in kv_types.inc
KV_DTYPES = DTYPES | {torch.float8_e4m3fn: 3, torch.int8: 4, torch.float8_e5m2: 5}
SEGMENT, TILE = 512, 16  # positions of a segment, of a tile
WRITE_VALUES = 8192  # of a chunk of write_kv: some microseconds
PARTIAL_BYTES = 64 << 20  # for results of segments; rows beyond are not split, which changes no result


class Item(Structure):
    _fields_ = [
        (name, c_int32) for name in ("row", "token", "num_query", "position", "segment", "num_segments", "partial")
    ]


class Merge(Structure):
    _fields_ = [(name, c_int32) for name in ("token", "num_query", "partial", "num_segments")]


class PlanArgs(Args):
    _fields_ = [
        ("work", c_int64 * 2),
        *((name, c_void_p) for name in ("items", "merges", "partial", "query_start", "seq_len", "table", "tree")),
        *((name, c_int64) for name in ("table_stride", "num_rows", "max_items", "max_partial")),
        *((name, c_int32) for name in ("num_q_heads", "num_kv_heads", "head_dim", "v_head_dim", "block_size")),
        *((name, c_int32) for name in ("window", "chunked", "causal", "latent", "full")),
    ]


class AttentionArgs(Args):
    _fields_ = [
        *((name, c_void_p) for name in ("plan", "q", "kv", "out", "slopes", "sinks")),
        *((name, c_int64) for name in ("q_stride", "q_head")),
        ("dtype", c_int32),
        ("kv_dtype", c_int32),
        ("scale", c_float),
        ("softcap", c_float),
    ]


class WriteArgs(Args):
    _fields_ = [
        *((name, c_void_p) for name in ("q", "k", "v", "kv", "slots", "cos", "sin")),
        *((name, c_int64) for name in ("q_stride", "q_head", "k_stride", "k_head", "v_stride", "v_head")),
        *((name, c_int64) for name in ("num_tokens", "step")),
        *((name, c_int32) for name in ("num_q_heads", "num_kv_heads", "head_dim", "v_head_dim", "block_size")),
        *((name, c_int32) for name in ("latent", "pairs", "interleaved", "dtype", "kv_dtype")),
    ]


class MoveArgs(Args):
    _fields_ = [
        *((name, c_void_p) for name in ("kv", "sources", "targets")),
        *((name, c_int64) for name in ("num_tokens", "layer_pages")),
        *((name, c_int32) for name in ("num_kv_heads", "head_dim", "v_head_dim", "block_size", "latent", "kv_dtype")),
    ]


class CpuPlan:
    """The work of a step; the same object, at the same addresses, in every step."""

    __slots__ = ("args", "batch", "memory", "native", "need", "num_tokens", "slopes", "slots", "work")

    def __init__(self, need: AttnNeed, native: Native, args: PlanArgs, memory: tuple[object, ...]) -> None:
        """`memory`: what `args` points to; it lives as long as the plan."""
        self.need, self.native, self.args, self.memory = need, native, args, memory
        self.work = addressof(args) + PlanArgs.work.offset
        self.slopes = torch.tensor(need.slopes) if need.alibi else None
        self.slots: Tensor = torch.empty(0, dtype=torch.int64)
        self.num_tokens = 0
        self.batch: AttnBatch | None = None  # its buffers are read


class CpuPlanner:
    capture: Literal["none", "decode", "any"] = "any"

    def __init__(self, need: AttnNeed, limits: StepLimits, native: Native) -> None:
        v_dim = need.v_head_dim or need.head_dim
        # Rows of at most a tile's queries (64) give an item per segment, longer ones one per tile.
        max_partial = PARTIAL_BYTES // (need.num_q_heads * (v_dim + 2) * 4)
        max_items = max_partial + limits.max_rows + limits.max_tokens
        items, merges = (Item * max_items)(), (Merge * max_items)()
        partial = torch.empty(PARTIAL_BYTES // 4)  # pages are taken as they are written to
        self.args = PlanArgs(
            items=addressof(items), merges=addressof(merges), partial=partial.data_ptr(),
            max_items=max_items, max_partial=max_partial, num_q_heads=need.num_q_heads, num_kv_heads=need.num_kv_heads,
            head_dim=need.head_dim, v_head_dim=v_dim, block_size=need.block_size, window=need.window or 0,
            chunked=need.chunked, causal=need.causal, latent=need.mla,
        )  # fmt: skip
        self.args.chunks[0] = 1
        self.result = CpuPlan(need, native, self.args, (items, merges, partial))

    def plan(self, batch: AttnBatch) -> CpuPlan:
        args, plan, table = self.args, self.result, batch.table.host
        if batch.max_seq > table.shape[1] * args.block_size:
            raise EngineError(f"a row of {batch.max_seq} tokens has a table of {table.shape[1]} blocks")
        args.query_start = batch.query_start.host.data_ptr()
        args.seq_len = batch.seq_len.host.data_ptr()
        args.table, args.table_stride = table.data_ptr(), table.stride(0)
        args.tree = None if batch.tree is None else batch.tree.host.data_ptr()
        args.num_rows, plan.batch = batch.num_rows, batch
        plan.native.run("attention_plan", args)
        if args.full:
            raise EngineError(f"{batch.num_rows} rows with {batch.num_tokens} tokens are more than was planned for")
        plan.slots, plan.num_tokens = batch.slots.push(batch.num_tokens), batch.num_tokens
        return plan


class CpuAttention(RotatingAttention, TreeAttention):
    name = "cpu"

    def __init__(self) -> None:
        self._native: Native | None = None
        # (shape, dtype, head_dim, v_head_dim) of KV planned for -> block size, and whether values are a part of keys
        self._pages: dict[tuple[object, ...], tuple[int, bool]] = {}

    def can_run(self, need: AttnNeed, device: DeviceInfo) -> str | None:
        if need.mla and (need.v_head_dim or need.head_dim) > need.head_dim:
            return f"values of {need.v_head_dim} entries are not a part of keys of {need.head_dim} (mla)"
        if need.num_q_heads % need.num_kv_heads:
            return f"{need.num_q_heads} query heads are not a multiple of {need.num_kv_heads} KV heads"
        if not need.causal and need.alibi:
            return "alibi is defined for causal attention only"
        return None

    def block_sizes(self, need: AttnNeed) -> tuple[int, ...]:
        return (16, *range(32, 1025, 16))

    def kv_shape(self, need: AttnNeed, num_blocks: int) -> tuple[int, ...]:
        return (num_blocks, need.num_kv_heads, need.block_size * (need.kv_width + kv_scale_bytes(need.kv_dtype)))

    def planner(self, need: AttnNeed, limits: StepLimits, platform: Platform) -> CpuPlanner:
        native = getattr(platform, "native", None)
        if native is None:
            raise PluginError(f"attention cpu needs the native kernels of the CPU platform: {MISSING}", fix=FIX)
        self._native = native
        v_dim, dtype = need.v_head_dim or need.head_dim, getattr(torch, need.kv_dtype)
        self._pages[self.kv_shape(need, 1)[1:], dtype, need.head_dim, v_dim] = need.block_size, need.mla
        return CpuPlanner(need, limits, native)

    def write_kv(self, k: Tensor, v: Tensor, kv: Tensor, slots: Tensor) -> None:
        self._write(k, v, kv, slots, k.shape[1])

    def rotate_write(
        self, q: Tensor, k: Tensor, v: Tensor, kv: Tensor, slots: Tensor, cos: Tensor, sin: Tensor, interleaved: bool
    ) -> None:
        num, heads, dim = q.shape
        _check("rotate_write", q=q, k=k)
        if q.stride(2) != 1 or k.stride(2) != 1:  # values of a head are not neighbours
            rows_q, rows_k = q.contiguous(), k.contiguous()
            self.rotate_write(rows_q, rows_k, v, kv, slots, cos, sin, interleaved)
            q.copy_(rows_q)
            k.copy_(rows_k)
            return
        if q.dtype != k.dtype or num != k.shape[0] or dim != k.shape[2] or 2 * cos.shape[1] > dim:
            raise PluginError(f"rotate_write: q {list(q.shape)}, k {list(k.shape)}, {cos.shape[1]} pairs")
        for t in (cos, sin):
            if t.shape != (num, cos.shape[1]) or t.dtype != torch.float32 or not t.is_contiguous():
                raise PluginError(f"rotate_write: cos {list(cos.shape)}, sin {list(sin.shape)}, {t.dtype}")
        self._write(
            k, v, kv, slots, heads + k.shape[1], q=q.data_ptr(), cos=cos.data_ptr(), sin=sin.data_ptr(),
            q_stride=q.stride(0), q_head=q.stride(1), num_q_heads=heads, pairs=cos.shape[1], interleaved=interleaved,
        )  # fmt: skip

    def _write(self, k: Tensor, v: Tensor, kv: Tensor, slots: Tensor, all_heads: int, **rotation: int) -> None:
        assert self._native is not None, "a planner comes first"
        (num, heads, dim), v_dim = k.shape, v.shape[2]
        found = self._pages.get((tuple(kv.shape[1:]), kv.dtype, dim, v_dim))
        if v.shape[:2] != (num, heads) or slots.shape != (num,) or kv.shape[1] != heads or found is None:
            raise PluginError(
                f"write_kv: k {list(k.shape)}, v {list(v.shape)}, slots {list(slots.shape)} do not fit KV memory "
                f"{list(kv.shape)}"
            )
        _check("write_kv", k=k, v=v)
        k, v = _rows(k), _rows(v)
        if k.dtype != v.dtype or kv.dtype not in KV_DTYPES or not kv.is_contiguous() or slots.dtype != torch.int64:
            raise PluginError(f"write_kv: k {k.dtype}, v {v.dtype}, slots {slots.dtype}, KV memory {kv.dtype}")
        args = WriteArgs(
            k=k.data_ptr(), v=v.data_ptr(), kv=kv.data_ptr(), slots=slots.data_ptr(), k_stride=k.stride(0),
            k_head=k.stride(1), v_stride=v.stride(0), v_head=v.stride(1), num_tokens=num, num_kv_heads=heads,
            head_dim=dim, v_head_dim=v_dim, block_size=found[0], latent=found[1],
            step=max(1, WRITE_VALUES // ((all_heads + heads) * dim)), dtype=DTYPES[k.dtype],
            kv_dtype=KV_DTYPES[kv.dtype],
            **rotation,
        )  # fmt: skip
        args.chunks[0] = -(-num // args.step)
        self._native.run("write_kv", args)

    def move_kv(self, kv: Tensor, need: AttnNeed, sources: Tensor, targets: Tensor) -> None:
        assert self._native is not None, "a planner comes first"
        if kv.shape[1:] != self.kv_shape(need, kv.shape[1]) or kv.dtype not in KV_DTYPES or not kv.is_contiguous():
            raise PluginError(f"move_kv: KV memory {list(kv.shape)} {kv.dtype} is not what was planned for")
        if not sources.shape == targets.shape == (len(sources),) or {sources.dtype, targets.dtype} != {torch.int64}:
            raise PluginError(f"move_kv: from {list(sources.shape)} {sources.dtype} to {list(targets.shape)}")
        sources, targets = sources.contiguous(), targets.contiguous()
        args = MoveArgs(
            kv=kv.data_ptr(), sources=sources.data_ptr(), targets=targets.data_ptr(), num_tokens=len(sources),
            layer_pages=kv.shape[1] * kv.shape[2], num_kv_heads=need.num_kv_heads, head_dim=need.head_dim,
            v_head_dim=need.v_head_dim or need.head_dim, block_size=need.block_size, latent=need.mla,
            kv_dtype=KV_DTYPES[kv.dtype],
        )  # fmt: skip
        args.chunks[0] = len(kv)
        self._native.run("move_kv", args)

    def forward(
        self, q: Tensor, kv: Tensor, plan: AttnPlan, scale: float, out: Tensor, sinks: Tensor | None = None
    ) -> None:
        assert isinstance(plan, CpuPlan)
        need = plan.need
        _check("forward", q=q, out=out)
        planned = (plan.num_tokens, need.num_q_heads, need.head_dim)
        if q.shape != planned or kv.shape[1:] != self.kv_shape(need, 1)[1:]:
            raise PluginError(f"forward: q {list(q.shape)} and KV memory {list(kv.shape)} are not what was planned for")
        if out.shape != (*q.shape[:2], need.v_head_dim or need.head_dim) or not out.is_contiguous():
            raise PluginError(f"forward: out {list(out.shape)} does not fit q {list(q.shape)}, or has gaps")
        if q.dtype != out.dtype or kv.dtype not in KV_DTYPES or not kv.is_contiguous():
            raise PluginError(f"forward: q {q.dtype}, out {out.dtype}, KV memory {kv.dtype}")
        if not scale > 0:
            raise PluginError(f"forward: a scale of {scale} is not positive")
        if sinks is not None and (sinks.shape != (need.num_q_heads,) or sinks.dtype != torch.float32):
            raise PluginError(f"forward: sinks {list(sinks.shape)} {sinks.dtype}")
        q = _rows(q)
        args = AttentionArgs(
            plan=addressof(plan.args), q=q.data_ptr(), kv=kv.data_ptr(), out=out.data_ptr(), q_stride=q.stride(0),
            q_head=q.stride(1), dtype=DTYPES[q.dtype], kv_dtype=KV_DTYPES[kv.dtype], scale=scale,
            softcap=need.softcap or 0.0,
            slopes=None if plan.slopes is None else plan.slopes.data_ptr(),
            sinks=None if sinks is None else sinks.data_ptr(),
        )  # fmt: skip
        plan.native.run("attention", args, plan.work)


def _check(what: str, **tensors: Tensor) -> None:
    """[T, heads, dim] on the host, of a known dtype."""
    for name, t in tensors.items():
        if t.device.type != "cpu" or t.dtype not in DTYPES:
            raise PluginError(f"{what}: {name} is {t.dtype} on {t.device}")
        if t.dim() != 3 or t.shape[2] % TILE:
            raise PluginError(f"{what}: {name} {list(t.shape)} is not [tokens, heads, a multiple of {TILE}]")


def _rows(t: Tensor) -> Tensor:
    """`t`, copied unless the values of each head are neighbours; tokens and heads may lie anywhere."""
    return t if t.stride(2) == 1 else t.contiguous()

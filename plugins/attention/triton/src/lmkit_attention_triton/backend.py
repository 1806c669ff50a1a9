"""TritonAttention, and the planner: host work of a step, into buffers made once."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple

import numpy as np
import torch
import triton
from lmkit.api import (
    AttentionBackend,
    AttentionRequest,
    AttnBatch,
    AttnNeed,
    AttnPlan,
    DeviceInfo,
    Platform,
    StepLimits,
    kv_scale_bytes,
)
from torch import Tensor

from lmkit_attention_triton import kernels
from lmkit_attention_triton.check import check

LIMITS = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}  # largest numbers of a float8 cache
HEADS = 4  # of a program that writes keys and values
TILE = 64  # keys at a time
FULL = 264  # programs that keep a large device busy: two for each of 132 multiprocessors
MAX_SPLITS = 32
LARGE = 200_000  # bytes of shared memory that a block may have on H100 and B200, and on no smaller ones


class Tile(NamedTuple):
    """How `attend` is launched."""

    rows: int  # tokens times query heads of a KV head
    tile: int  # keys at a time
    warps: int
    stages: int
    registers: int = 0  # that a thread may have; 0: as many as it wants

    @property
    def options(self) -> dict[str, int]:
        """How Triton is told."""
        limit = {"maxnreg": self.registers} if self.registers else {}
        return {"num_warps": self.warps, "num_stages": self.stages, **limit}


class Memory(NamedTuple):
    """Where the kernels find keys, values and their scales in KV memory, in elements."""

    scales: Tensor  # float32; without scales, the memory itself
    block: int  # from a block's codes to the next one's
    slot: int
    head: int
    scale_block: int
    scale_rest: int  # from the first scale of a token and head to the second
    page: int
    width: int  # entries of a head


def memory_of(kv: Tensor) -> Memory:
    """That of a layer. int8 has its scales behind the codes of a block, for which the last axis has room."""
    _, page, heads, width = kv.shape
    if kv.dtype != torch.int8:
        return Memory(kv, kv.stride(0), kv.stride(1), kv.stride(2), 0, 0, page, width)
    width -= kv_scale_bytes("int8")
    flat = kv.view(len(kv), -1)
    scales = flat[:, page * heads * width :].view(torch.float32)
    return Memory(scales, flat.stride(0), heads * width, width, scales.stride(0), heads * page, page, width)


class Sizes(NamedTuple):
    """Sizes of the tiles that hold entries of a head: powers of two."""

    keys: int
    rest: int  # of keys beside the part that is values; 0: values stand by themselves
    values: int


def sizes_of(size: int, v_size: int, mla: bool) -> Sizes:
    """The tiles of keys of `size` entries and values of `v_size`."""
    if mla:
        held = max(16, triton.next_power_of_2(v_size))
        return Sizes(held, max(16, triton.next_power_of_2(size - v_size)), held)
    return Sizes(triton.next_power_of_2(size), 0, triton.next_power_of_2(v_size))


class Room(NamedTuple):
    """What decides how large tiles are."""

    shared: int = 0  # bytes of shared memory that a block may have; 0: as on all
    hopper: bool = False


NONE = Room()


@lru_cache
def room_of(device: torch.device) -> Room:
    """That of a device; none where torch does not say, and of AMD's GPUs."""
    if device.type != "cuda" or torch.version.hip:
        return Room()
    properties = torch.cuda.get_device_properties(device)
    return Room(int(getattr(properties, "shared_memory_per_block_optin", 0)), properties.major == 9)


def tile_of(sizes: Sizes, queries: int, members: int, itemsize: int, room: Room) -> Tile:
    """For `members` heads of a KV head: what fits into registers and shared memory of every GPU in the budgets, and
    more at a time where there is room."""
    if sizes.rest:
        if itemsize > 2:
            return Tile(16, TILE // 4, 8, 2)
        return Tile(16 if queries == 1 and members <= 16 else 32, TILE // 2, 8, 2)
    size = max(sizes.keys, sizes.values)
    large = room.shared >= LARGE
    if queries == 1:
        if size * itemsize > 256:
            return Tile(16, TILE // 2, 8, 2)
        return Tile(16, 2 * TILE if large else TILE, 4, 2)
    if size * itemsize <= 256:
        if room.hopper and itemsize == 2:  # two blocks, with 128 registers each: one multiplies, the other adds up
            return Tile(128, 2 * TILE if size <= 64 else TILE, 8, 2, 128)
        return Tile(64, TILE, 4 if large or size * itemsize <= 128 else 8, 2)
    return Tile(32, TILE // 2, 8, 2 if size * itemsize <= 512 else 1)


def programs_of(need: AttnNeed, queries: int, itemsize: int, room: Room = NONE) -> tuple[Sizes, Tile, int, int]:
    """How `attend` is launched for `queries` of a row at most; query heads of a KV head in a program, and in how many.

    Latents are read by all heads, of which a program takes as many as there is room for.
    """
    sizes = sizes_of(need.head_dim, need.v_head_dim or need.head_dim, need.mla)
    members = triton.next_power_of_2(need.num_q_heads // need.num_kv_heads)
    float8 = need.kv_dtype.startswith("float8")
    uneven = float8 and sizes.keys != sizes.values
    roomy = need.kv_dtype in ("auto", need.dtype) or (float8 and room.hopper and not uneven)
    shape = tile_of(sizes, queries, members, itemsize, room if roomy else NONE)
    if uneven and queries > 1 and not need.mla:
        shape = shape._replace(warps=8)  # with 4, results of most queries are wrong: Triton 3.6 on an H100
    if need.kv_dtype == "int8" and (queries > 1 or need.mla):  # codes take registers on their way
        shape = shape._replace(tile=shape.tile // 2)
    groups = triton.cdiv(members, shape.rows) if need.mla else 1
    return sizes, shape, members // groups, groups


@dataclass(slots=True)
class TritonPlan:
    """On the device, but for the numbers. Of a decode step every tensor lies where it lay in the step before."""

    slots: Tensor  # [T] int64
    query_start: Tensor  # [R + 1] int32
    seq_len: Tensor  # [R] int32
    page_start: Tensor  # [max_rows] int32, first of a row's pages
    pages: Tensor  # [R, max_blocks] int32, those of each row from its first column on
    num_decode: int  # rows [0, num_decode) have at most one query
    num_rows: int
    max_query: int
    splits: int  # of each decode row
    owner: TritonPlanner


class TritonPlanner:
    capture: Literal["none", "decode", "any"] = "decode"

    def __init__(self, need: AttnNeed, limits: StepLimits, platform: Platform) -> None:
        self.need = need
        device = platform.buffer((1,), torch.int32).device.device
        self.rows = torch.arange(limits.max_rows, dtype=torch.int32, device=device)
        self.starts: dict[int, Tensor] = {}  # columns of a block table -> where the pages of its rows begin
        itemsize = getattr(torch, need.dtype).itemsize
        self.programs = need.num_kv_heads * programs_of(need, 1, itemsize)[3]  # of a row of a decode step
        self.most_splits = min(MAX_SPLITS, triton.next_power_of_2(max(1, limits.max_length // (2 * TILE))))
        parts = max(n * self.splits(n) for n in range(1, limits.max_rows + 1)) * need.num_q_heads
        self.partial = torch.empty(parts, need.v_head_dim or need.head_dim, dtype=torch.float32, device=device)
        self.logs = torch.empty(parts, dtype=torch.float32, device=device)
        self.slopes = torch.tensor(need.slopes, device=device) if need.alibi else self.logs

    def splits(self, rows: int) -> int:
        """So that a decode step of that many rows fills a device. Nothing else counts: a graph is captured once."""
        wanted = triton.next_power_of_2(triton.cdiv(FULL, rows * self.programs))
        return max(1, min(wanted, self.most_splits))

    def plan(self, batch: AttnBatch) -> TritonPlan:
        n, width = batch.num_rows, batch.table.host.shape[1]
        if width not in self.starts:
            self.starts[width] = self.rows * width
        decode, longest = batch.num_decode_rows, int(n > batch.num_decode_rows)
        if batch.max_query > 1:
            queries = np.diff(batch.query_start.host[: n + 1].numpy())
            decode = decode if (queries[:decode] <= 1).all() else 0
            longest = int(queries[decode:].max(initial=0))
        return TritonPlan(
            slots=batch.slots.push(batch.num_tokens), query_start=batch.query_start.push(n + 1),
            seq_len=batch.seq_len.push(n), page_start=self.starts[width], pages=batch.table.push(n),
            num_decode=decode, num_rows=n, max_query=longest,
            splits=self.splits(max(1, decode)), owner=self,
        )  # fmt: skip


class TritonAttention(AttentionBackend):
    name = "triton"

    def can_run(self, need: AttnNeed, device: DeviceInfo) -> str | None:
        if refused := next(check(AttentionRequest(need=need, device=device)), None):
            return str(refused)
        if need.num_q_heads % need.num_kv_heads:
            return f"{need.num_q_heads} query heads are not a multiple of {need.num_kv_heads} KV heads"
        if not need.causal and need.alibi:
            return "alibi is defined for causal attention only"
        return None

    def block_sizes(self, need: AttnNeed) -> tuple[int, ...]:
        return (16, 32, 64, 128)

    def kv_shape(self, need: AttnNeed, num_blocks: int) -> tuple[int, ...]:
        return (num_blocks, need.block_size, need.num_kv_heads, need.kv_width + kv_scale_bytes(need.kv_dtype))

    def planner(self, need: AttnNeed, limits: StepLimits, platform: Platform) -> TritonPlanner:
        return TritonPlanner(need, limits, platform)

    def write_kv(self, k: Tensor, v: Tensor, kv: Tensor, slots: Tensor) -> None:
        tokens, heads, size = k.shape
        if tokens:
            some, where = min(HEADS, triton.next_power_of_2(heads)), memory_of(kv)
            int8, values = kv.dtype == torch.int8, _written(v, k, where)
            split = int8 and not values  # two scales of a key, of which values are a part
            kernels.write[(tokens, triton.cdiv(heads, some))](
                k, v, kv, where.scales, slots, heads, size, v.shape[2], *k.stride(), *v.stride(), *where[1:7],
                LIMITS.get(kv.dtype, 0.0), int8, some, triton.next_power_of_2(v.shape[2] if split else size), values,
                triton.next_power_of_2(size - v.shape[2]) if split else 0, num_warps=2,
            )  # fmt: skip

    def rotate_write(
        self, q: Tensor, k: Tensor, v: Tensor, kv: Tensor, slots: Tensor, cos: Tensor, sin: Tensor, interleaved: bool
    ) -> None:
        tokens, heads, size = k.shape
        pairs, rest, where = cos.shape[-1], size - 2 * cos.shape[-1], memory_of(kv)
        later = kv.dtype == torch.int8 and where.width == size  # two scales of a key, whose entries are turned first
        if tokens:
            here = torch.full_like(slots, -1) if later else slots
            grid = (tokens, triton.cdiv(q.shape[1], HEADS) + triton.cdiv(heads, HEADS))
            kernels.rotate_write[grid](
                q, k, v, kv, where.scales, here, cos, sin, q.shape[1], heads, size, v.shape[2], pairs,
                *q.stride(), *k.stride(), *v.stride(), *where[1:7],
                interleaved, LIMITS.get(kv.dtype, 0.0), kv.dtype == torch.int8, HEADS, triton.next_power_of_2(pairs),
                triton.next_power_of_2(rest) if rest else 0, _written(v, k, where), num_warps=2,
            )  # fmt: skip
        if later:
            self.write_kv(k, v, kv, slots)

    def forward(
        self, q: Tensor, kv: Tensor, plan: AttnPlan, scale: float, out: Tensor, sinks: Tensor | None = None
    ) -> None:
        assert isinstance(plan, TritonPlan)
        owner, decode = plan.owner, plan.num_decode
        if decode:
            self._attend(q, kv, plan, scale, out, sinks, 0, decode, 1, plan.splits)
            if plan.splits > 1:
                size = out.shape[2]
                kernels.merge[(decode, q.shape[1])](
                    out, owner.partial, owner.logs, plan.query_start, plan.seq_len, q.shape[1], size,
                    out.stride(0), out.stride(1), plan.splits, triton.next_power_of_2(size), num_warps=2,
                )  # fmt: skip
        if plan.num_rows > decode and plan.max_query:
            self._attend(q, kv, plan, scale, out, sinks, decode, plan.num_rows - decode, plan.max_query, 1)

    def _attend(
        self, q: Tensor, kv: Tensor, plan: TritonPlan, scale: float, out: Tensor, sinks: Tensor | None,
        first: int, rows: int, queries: int, splits: int,
    ) -> None:  # fmt: skip
        owner = plan.owner
        need, heads, group = owner.need, q.shape[1], q.shape[1] // owner.need.num_kv_heads
        sizes, shape, members, groups = programs_of(need, queries, q.dtype.itemsize, room_of(q.device))
        tokens, where = max(1, shape.rows // members), memory_of(kv)
        kernels.attend[(rows, triton.cdiv(queries, tokens), need.num_kv_heads * groups * splits)](
            q, kv, where.scales, out, owner.partial, owner.logs, owner.logs if sinks is None else sinks, owner.slopes,
            plan.query_start, plan.seq_len, plan.page_start, plan.pages, scale, need.softcap or 1.0, first,
            heads, group, q.shape[2], out.shape[2], *q.stride(), *where[1:6], out.stride(0), out.stride(1),
            kv.dtype == torch.int8, need.causal, need.window or 0, need.chunked, need.softcap is not None,
            sinks is not None, need.alibi, splits, need.block_size, shape.tile, tokens, members, groups, *sizes,
            **shape.options,
        )  # fmt: skip


def _written(v: Tensor, k: Tensor, where: Memory) -> int:
    """Entries of a tile of values that go into the cache: 0 where they are a part of keys."""
    return triton.next_power_of_2(v.shape[2]) if where.width > k.shape[2] else 0

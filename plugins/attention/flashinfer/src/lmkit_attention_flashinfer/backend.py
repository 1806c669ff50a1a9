"""Paged attention by flashinfer.

KV of a layer: [2, num_blocks, block_size, num_kv_heads, head_dim], K, then V. Latents: [num_blocks, block_size,
head_dim].
"""

from __future__ import annotations

import logging
from subprocess import SubprocessError
from time import perf_counter

import torch
from lmkit.api import AttnBatch, AttnNeed, DeviceInfo, Platform, PluginError, StepLimits
from torch import Tensor

from lmkit_attention_flashinfer.check import TILE, shapes
from lmkit_attention_flashinfer.latents import LatentPlan, LatentPlanner
from lmkit_attention_flashinfer.planner import FlashInferPlan, FlashInferPlanner

log = logging.getLogger("lmkit.attention.flashinfer")

MIB = 1 << 20
MULTIPROCESSORS = 192  # of the largest GPUs, and some
FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)


class FlashInferAttention:
    """AttentionBackend over flashinfer's paged wrappers."""

    name = "flashinfer"

    def __init__(self, workspace_mb: int = 128, kernels: str = "auto") -> None:
        self._workspace_mb, self._kernels = workspace_mb, kernels
        self._workspace: dict[torch.device, Tensor] = {}  # shared by all planners: only used while a kernel runs

    def can_run(self, need: AttnNeed, device: DeviceInfo) -> str | None:
        if need.sinks or need.alibi:
            return "sinks and alibi are not supported"
        if self._kernels == "fa3":
            if device.platform == "cuda" and (device.capability or (0, 0))[0] != 9:
                return "the kernels fa3 are made for compute capability 9.0"
            if need.kv_dtype not in ("auto", need.dtype):
                return f"the kernels fa3 read keys and values in {need.dtype} alone, not in {need.kv_dtype}"
        if reason := shapes(need):
            return reason
        if need.num_q_heads % need.num_kv_heads:
            return f"{need.num_q_heads} query heads are not a multiple of {need.num_kv_heads} KV heads"
        return None

    def block_sizes(self, need: AttnNeed) -> tuple[int, ...]:
        return (16, 32, 64, 8, 1)

    def kv_shape(self, need: AttnNeed, num_blocks: int) -> tuple[int, ...]:
        if need.mla:
            return (num_blocks, need.block_size, need.head_dim)
        return (2, num_blocks, need.block_size, need.num_kv_heads, need.head_dim)

    def planner(self, need: AttnNeed, limits: StepLimits, platform: Platform) -> FlashInferPlanner | LatentPlanner:
        """Compiles the kernels where no earlier start on this machine has, which takes minutes. Raises PluginError."""
        device = platform.buffer((1,), torch.int32).device.device
        size, have = max(self._workspace_mb * MIB, scratch(need, limits.max_rows)), self._workspace.get(device)
        if have is None or have.nbytes < size:
            self._workspace[device] = torch.zeros(size, dtype=torch.uint8, device=device)
        family, workspace = self._family(need, device), self._workspace[device]
        planner: FlashInferPlanner | LatentPlanner
        if need.mla:
            planner = LatentPlanner(need, limits, platform, workspace, family)
        else:
            # On an H100 fa3 takes up to eight times as long as fa2 for decode rows, and half as long for prompts.
            decoding = "fa2" if self._kernels == "auto" else family
            planner = FlashInferPlanner(need, limits, platform, workspace, family, decoding)
        self._warm_up(planner, platform, device)
        return planner

    def _family(self, need: AttnNeed, device: torch.device) -> str:
        """Named, as `auto` lets newer releases choose kernels that no graph may hold, or that read no such cache."""
        from flashinfer.utils import is_sm90a_supported

        if self._kernels != "auto":
            return self._kernels
        return "fa3" if need.kv_dtype == need.dtype and is_sm90a_supported(device) else "fa2"

    def _warm_up(self, planner: FlashInferPlanner | LatentPlanner, platform: Platform, device: torch.device) -> None:
        """A decode row and a prompt of two tokens, so that no request waits for compilers."""
        need, began = planner.need, perf_counter()
        dtype, heads = getattr(torch, need.dtype), (need.num_q_heads, need.head_dim)
        log.info("loading flashinfer's kernels for heads of %d; the first start compiles them", need.head_dim)
        kv = torch.zeros(self.kv_shape(need, 1), dtype=getattr(torch, need.kv_dtype), device=device)
        try:
            for tokens in (1, 2):
                plan = planner.plan(_batch(platform, tokens))
                q = torch.zeros(tokens, *heads, dtype=dtype, device=device)
                out = q.new_empty(tokens, need.num_q_heads, need.v_head_dim or need.head_dim)
                self.forward(q, kv, plan, 1.0, out)
                out.cpu()  # what goes wrong in a kernel shows here
        except (RuntimeError, OSError, SubprocessError) as e:
            said = "\n".join(str(e).splitlines()[-12:])  # of a compiler's the last lines
            raise PluginError(
                f"flashinfer cannot compile or load its kernels: {said}",
                fix="install what the message misses, or choose another with --attention",
            ) from e
        log.info("flashinfer's kernels are loaded after %.1f s", perf_counter() - began)

    def write_kv(self, k: Tensor, v: Tensor, kv: Tensor, slots: Tensor) -> None:
        """A slot of -1 is one of the null block, which belongs to no row: nothing is read, and nobody waits."""
        slots = slots.clamp(min=0)
        if kv.dim() == 3:  # latents, of which values are a part
            kv.view(-1, kv.shape[2]).index_copy_(0, slots, k[:, 0])
            return
        for part, value in zip(kv, (k, v), strict=True):
            places = part.view(-1, *part.shape[2:])
            if kv.dtype in FLOAT8:  # which torch cannot index
                largest = torch.finfo(kv.dtype).max
                value = value.clamp(-largest, largest).to(kv.dtype).view(torch.uint8)
                places = places.view(torch.uint8)
            places.index_copy_(0, slots, value)

    def forward(self, q: Tensor, kv: Tensor, plan: FlashInferPlan | LatentPlan, scale: float, out: Tensor) -> None:
        if q.stride(-1) != 1:
            q = q.contiguous()
        if isinstance(plan, LatentPlan):
            plan.run(q, kv, scale, out)
            return
        pages = (kv[0], kv[1])
        n, m = plan.num_decode, plan.num_prefill
        if plan.decode is not None:
            plan.decode.run(q[:n], pages, q_scale=scale, out=out[:n])
        if m:
            plan.prefill.run(q[n : n + m], pages, q_scale=scale, out=out[n : n + m])


def scratch(need: AttnNeed, rows: int) -> int:
    """Bytes that a captured decode step of so many rows takes for parts of rows: an output for each tile, in float32.

    A tile has 16 queries, or 64 where more heads share keys; each row begins one, and each multiprocessor has two. Of
    latents a tile is two for each multiprocessor, whatever the rows.
    """
    if need.mla:
        return 2 * MULTIPROCESSORS * TILE * ((need.v_head_dim or need.head_dim) + 1) * 4 + MIB
    group = need.num_q_heads // need.num_kv_heads
    tile = 16 if group <= 16 else 64
    tiles = max(-(-rows * group // tile) + rows - 1, 2 * MULTIPROCESSORS // need.num_kv_heads)
    return need.num_q_heads * tiles * tile * (need.head_dim + 1) * 4 + MIB


def _batch(platform: Platform, tokens: int) -> AttnBatch:
    """One row of so many tokens, in block 0."""
    values = ([0, tokens], [tokens], [[0] * tokens], list(range(tokens)))
    dtypes = (torch.int32, torch.int32, torch.int32, torch.int64)
    buffers = []
    for value, dtype in zip(values, dtypes, strict=True):
        content = torch.tensor(value, dtype=dtype)
        buffer = platform.buffer(tuple(content.shape), dtype)
        buffer.host.copy_(content)
        buffers.append(buffer)
    query_start, seq_len, table, slots = buffers
    return AttnBatch(
        query_start, seq_len, table, slots, num_rows=1, num_tokens=tokens, max_query=tokens, max_seq=tokens,
        num_decode_rows=int(tokens == 1),
    )  # fmt: skip

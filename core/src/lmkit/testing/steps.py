"""Driving a model or a backend without scheduler and worker: rows with scattered blocks, steps of any shape."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from lmkit.api import (
    AttentionBackend,
    AttnBatch,
    AttnNeed,
    Collectives,
    LoadedModel,
    StateBatch,
    StateTensor,
    StepInputs,
    StepLimits,
)


class PlainBuffer:
    """A Buffer on the CPU: host and device are one tensor."""

    def __init__(self, tensor: Tensor, device: torch.device | str = "cpu") -> None:
        self.host = tensor
        self.device = tensor.to(device)

    def push(self, n: int) -> Tensor:
        self.device[:n].copy_(self.host[:n])
        return self.device[:n]


class PlainPlatform:
    """As much of a Platform as planners and loading need."""

    name = "plain"

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.torch_device = torch.device(device)
        self.device_type = self.torch_device.type

    def buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> PlainBuffer:
        return PlainBuffer(torch.zeros(shape, dtype=dtype), self.torch_device)


@dataclass(slots=True)
class PagedRow:
    """A row's length so far and its blocks."""

    length: int = 0
    blocks: list[int] = field(default_factory=list)


class PagedRows:
    """Block tables of rows that grow; blocks are handed out in random order, block 0 never."""

    def __init__(self, num_rows: int, num_blocks: int, block_size: int, seed: int = 0) -> None:
        self.rows = [PagedRow() for _ in range(num_rows)]
        self.num_blocks, self.block_size = num_blocks, block_size
        self._free = list(range(1, num_blocks))
        random.Random(seed).shuffle(self._free)

    def grow(self, work: Sequence[tuple[int, int]], device: torch.device | str = "cpu") -> AttnBatch:
        """The batch of a step in which `work` = (row, number of new tokens), in batch order; lengths advance."""
        slots: list[int] = []
        starts = [0]
        for index, count in work:
            row = self.rows[index]
            for position in range(row.length, row.length + count):
                if position // self.block_size == len(row.blocks):
                    row.blocks.append(self._free.pop())
                slots.append(row.blocks[position // self.block_size] * self.block_size + position % self.block_size)
            row.length += count
            starts.append(starts[-1] + count)
        used = [self.rows[index] for index, _ in work]
        width = max([len(r.blocks) for r in used], default=0) or 1
        table = torch.full((max(len(used), 1), width), -1, dtype=torch.int32)  # beyond a row's blocks: never valid
        for i, row in enumerate(used):
            table[i, : len(row.blocks)] = torch.tensor(row.blocks, dtype=torch.int32)

        def buffer(values: Any, dtype: torch.dtype) -> PlainBuffer:
            return PlainBuffer(torch.as_tensor(values, dtype=dtype), device)

        return AttnBatch(
            query_start=buffer(starts, torch.int32),
            seq_len=buffer([r.length for r in used], torch.int32),
            table=PlainBuffer(table, device),
            slots=buffer(slots, torch.int64),
            num_rows=len(used),
            num_tokens=starts[-1],
            max_query=max([count for _, count in work], default=0),
            max_seq=max([r.length for r in used], default=0),
            num_decode_rows=next((i for i, (_, count) in enumerate(work) if count != 1), len(work)),
        )


def plain_platform(device: torch.device | str = "cpu") -> Any:
    """A PlainPlatform where a Platform is wanted."""
    return PlainPlatform(device)


class ModelDriver:
    """Runs steps of a loaded model on `num_rows` rows; unwritten KV memory holds NaN, so that reading it shows."""

    def __init__(
        self, loaded: LoadedModel, dtype: str, *, num_rows: int = 4, block_size: int = 4, num_blocks: int = 128,
        seed: int = 0, tp_size: int = 1, kv_dtype: str = "", platform: Any = None,
    ) -> None:  # fmt: skip
        backend: Any = loaded.attention  # None: no layer has attention
        self.loaded = loaded
        self.paged = PagedRows(num_rows, num_blocks, block_size, seed)
        known: dict[str, Any] = {"dtype": dtype, "kv_dtype": kv_dtype or dtype, "block_size": block_size}

        def local(need: AttnNeed) -> AttnNeed:
            heads: dict[str, Any] = {
                "num_q_heads": need.num_q_heads // tp_size,
                "num_kv_heads": need.num_kv_heads // tp_size,
            }
            return replace(need, **known, **heads)

        limits = StepLimits(num_rows, 4096, num_blocks, num_blocks * block_size)
        platform = platform or plain_platform()
        self.planners = [backend.planner(local(need), limits, platform) for need, _ in loaded.info.kv_groups()]
        layers = loaded.info.layers
        self.kv = [
            kv_memory(backend, local(layer.attn), num_blocks) if layer.attn else torch.empty(0) for layer in layers
        ]
        self.state = [state_memory(layer.state, num_rows) for layer in layers] if loaded.info.recurrent else []

    def step(self, work: Sequence[tuple[int, Sequence[int]]]) -> list[Tensor]:
        """`work` = (row, its next tokens); returns logits [tokens, V] of each."""
        logits = self.loaded.model.logits(self.hidden(work))
        return list(logits.float().split([len(ids) for _, ids in work]))

    def hidden(self, work: Sequence[tuple[int, Sequence[int]]], read: Sequence[int] | None = None) -> Tensor:
        """Hidden states [tokens, D] of a step; of the tokens `read` alone where the model can leave out others."""
        positions = [
            p for i, ids in work for p in range(self.paged.rows[i].length, self.paged.rows[i].length + len(ids))
        ]
        batch = self.paged.grow([(i, len(ids)) for i, ids in work])
        x = StepInputs(
            token_ids=torch.tensor([t for _, ids in work for t in ids], dtype=torch.int64),
            positions=torch.tensor(positions, dtype=torch.int64),
            attn=[planner.plan(batch) for planner in self.planners],
            kv=self.kv,
            logits_rows=torch.arange(len(positions)) if read is None else torch.tensor(read, dtype=torch.int64),
            only_logits=read is not None,
            state=self._state_batch([row for row, _ in work], batch) if self.state else None,
        )
        return self.loaded.model.forward(x)

    def _state_batch(self, rows: Sequence[int], batch: AttnBatch) -> StateBatch:
        """Row i has slot num_rows - i, and zeros there when it begins."""
        slots = [len(self.paged.rows) - row for row in rows]
        starts, decodes = batch.query_start.host.tolist(), batch.num_decode_rows
        for i, slot in enumerate(slots):
            if batch.seq_len.host[i] == starts[i + 1] - starts[i]:
                for tensors in self.state:
                    for tensor in tensors.values():
                        tensor[slot] = 0
        return StateBatch(
            tensors=self.state,
            slots=torch.tensor(slots),
            query_start=batch.query_start.host,
            num_decode_rows=decodes,
            prompts=list(zip(slots[decodes:], starts[decodes:-1], starts[decodes + 1 :], strict=True)),
        )

    def run(self, row: int, ids: Sequence[int], chunk: int) -> Tensor:
        """Logits [tokens, V] of a whole prompt, computed `chunk` tokens at a time."""
        return torch.cat([self.step([(row, ids[i : i + chunk])])[0] for i in range(0, len(ids), chunk)])

    def greedy(self, prompts: Sequence[Sequence[int]], count: int, chunk: int = 0) -> list[list[int]]:
        """`count` greedy tokens for each prompt, decoded together; prompts enter `chunk` tokens a step (0 = whole)."""
        last: list[Tensor] = []
        for row, prompt in enumerate(prompts):
            last.append(self.run(row, prompt, chunk or len(prompt))[-1])
        out = [[int(logits.argmax())] for logits in last]
        for _ in range(count - 1):
            for row, logits in enumerate(self.step([(row, tokens[-1:]) for row, tokens in enumerate(out)])):
                out[row].append(int(logits[-1].argmax()))
        return out


class Ranks:
    """Collectives of `size` ranks that are threads of this process."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.barrier = threading.Barrier(size)
        self.values: list[Any] = [None] * size

    def rank(self, rank: int) -> Collectives:
        return _Rank(self, rank)

    def run(self, work: Callable[[Collectives], Any]) -> list[Any]:
        """work(collectives) of every rank, at the same time; their results by rank, or the first error."""
        with ThreadPoolExecutor(self.size) as pool:
            return list(pool.map(lambda rank: work(self.rank(rank)), range(self.size)))


class _Rank(Collectives):
    def __init__(self, ranks: Ranks, rank: int) -> None:
        self.ranks, self.rank, self.size = ranks, rank, ranks.size

    def _exchange(self, x: Tensor) -> list[Tensor]:
        """Everybody's tensor."""
        self.ranks.values[self.rank] = x
        self.ranks.barrier.wait(60)
        values = list(self.ranks.values)
        self.ranks.barrier.wait(60)
        return values

    def all_reduce(self, x: Tensor) -> Tensor:
        return torch.stack(self._exchange(x)).sum(0)

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        return torch.cat(self._exchange(x), dim)

    def broadcast(self, x: Tensor, src: int) -> Tensor:
        return self._exchange(x)[src]


def kv_memory(backend: AttentionBackend, need: AttnNeed, num_blocks: int, device: torch.device | str = "cpu") -> Tensor:
    """One layer's KV tensor, full of NaN: integers of -1, of which float32 scales are made, are NaN too."""
    dtype = getattr(torch, need.kv_dtype if need.kv_dtype != "auto" else need.dtype)
    fill = torch.nan if dtype.is_floating_point else -1
    return torch.full(backend.kv_shape(need, num_blocks), fill, dtype=dtype, device=device)


def state_memory(state: Sequence[StateTensor], num_rows: int) -> dict[str, Tensor]:
    """The state tensors of one layer for so many rows and slot 0, full of NaN."""
    return {t.name: torch.full((num_rows + 1, *t.shape), torch.nan, dtype=getattr(torch, t.dtype)) for t in state}

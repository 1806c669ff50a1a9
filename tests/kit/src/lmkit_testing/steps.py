"""Driving a model or a backend without scheduler and worker: rows with scattered blocks, steps of any shape."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from queue import SimpleQueue
from typing import Any

import torch
from lmkit.api import (
    AttentionBackend,
    AttnBatch,
    AttnNeed,
    Collectives,
    StateBatch,
    StateTensor,
    StepInputs,
    StepLimits,
)
from lmkit_bench.pages import PagedRows, plain_platform
from lmkit_worker.loaded import LoadedModel
from torch import Tensor


class ModelDriver:
    """Runs steps of a loaded model on `num_rows` rows; unwritten KV memory holds NaN, so that reading it shows."""

    def __init__(
        self, loaded: LoadedModel, dtype: str, *, num_rows: int = 4, block_size: int = 4, num_blocks: int = 128,
        seed: int = 0, kv_dtype: str = "", platform: Any = None,
    ) -> None:  # fmt: skip
        backend: Any = loaded.attention  # None: no layer has attention
        self.loaded = loaded
        self.paged = PagedRows(num_rows, num_blocks, block_size, seed)
        known: dict[str, Any] = {"dtype": dtype, "kv_dtype": kv_dtype or dtype, "block_size": block_size}

        def local(need: AttnNeed) -> AttnNeed:
            return replace(need, **known)

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
        self.sent = [[SimpleQueue[Tensor]() for _ in range(size)] for _ in range(size)]  # by sender, then receiver

    def rank(self, rank: int) -> Collectives:
        return _Rank(self, rank)

    def run(self, work: Callable[[Collectives], Any]) -> list[Any]:
        """work(collectives) of every rank, at the same time; their results by rank, or the first error."""
        with ThreadPoolExecutor(self.size) as pool:
            return list(pool.map(lambda rank: work(self.rank(rank)), range(self.size)))

    def logits(self, load: Callable[..., LoadedModel], token_ids: Sequence[int]) -> list[Tensor]:
        """[T, V] by every rank of a model in float32, which `load(collectives=...)` makes."""
        return self.run(lambda mine: ModelDriver(load(collectives=mine), "float32").run(0, token_ids, 29))


class _Rank(Collectives):
    def __init__(self, ranks: Ranks, rank: int) -> None:
        self.ranks, self.rank, self.size = ranks, rank, ranks.size

    def _exchange(self, x: Tensor) -> list[Tensor]:
        """Everybody's tensor."""
        self.ranks.values[self.rank] = x.clone()  # it may be changed as soon as this returns
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

    def send(self, x: Tensor, dst: int) -> None:
        self.ranks.sent[self.rank][dst].put(x.clone())

    def receive(self, out: Tensor, src: int) -> Tensor:
        return out.copy_(self.ranks.sent[src][self.rank].get(timeout=60))


def kv_memory(backend: AttentionBackend, need: AttnNeed, num_blocks: int, device: torch.device | str = "cpu") -> Tensor:
    """One layer's KV tensor, full of NaN: integers of -1, of which float32 scales are made, are NaN too."""
    dtype = getattr(torch, need.kv_dtype if need.kv_dtype != "auto" else need.dtype)
    fill = torch.nan if dtype.is_floating_point else -1
    return torch.full(backend.kv_shape(need, num_blocks), fill, dtype=dtype, device=device)


def state_memory(state: Sequence[StateTensor], num_rows: int) -> dict[str, Tensor]:
    """The state tensors of one layer for so many rows and slot 0, full of NaN."""
    return {t.name: torch.full((num_rows + 1, *t.shape), torch.nan, dtype=getattr(torch, t.dtype)) for t in state}

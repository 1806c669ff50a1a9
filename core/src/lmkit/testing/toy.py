"""A model and an attention backend small enough to reason about: the next token is a checksum of what is read from KV.

Any error in slots, tables, positions or row order changes the checksum, so tokens are compared, not tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lmkit.api import (
    AttnBatch,
    AttnNeed,
    Collectives,
    DeviceInfo,
    LayerInfo,
    LoadedModel,
    ModelInfo,
    NullCollectives,
    NullEvent,
    NullGraphs,
    Platform,
    StepInputs,
    StepLimits,
)

TOY_VOCAB = 97


class ToyBuffer:
    """One tensor is both host and device side."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self.host = self.device = torch.zeros(shape, dtype=dtype)

    def push(self, n: int) -> Tensor:
        return self.device[:n]


class ToyPlatform:
    """Host memory, no threads of its own, `memory` bytes free."""

    name = "toy"
    device_type = "cpu"

    def __init__(self, memory: int = 1 << 28) -> None:
        self.memory = memory

    def worker_env(self, config: object, rank: int) -> dict[str, str]:
        return {}

    def bind(self, rank: int) -> torch.device:
        return torch.device("cpu")

    def free_memory(self) -> int:
        return self.memory

    def defaults(self, model: ModelInfo, device: DeviceInfo) -> dict[str, object]:
        return {}

    def buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> ToyBuffer:
        return ToyBuffer(shape, dtype)

    def event(self) -> NullEvent:
        return NullEvent()

    def graphs(self, limits: StepLimits) -> NullGraphs:
        return NullGraphs()

    def collectives(self, rank: int, size: int) -> Collectives:
        return NullCollectives()


@dataclass(slots=True)
class ToyPlan:
    """Host copies of one step's batch."""

    slots: Tensor
    table: list[list[int]]
    query_start: list[int]
    seq_len: list[int]
    block_size: int


class ToyPlanner:
    capture = "none"

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.batches: list[AttnBatch] = []

    def plan(self, batch: AttnBatch) -> ToyPlan:
        n = batch.num_rows
        self.batches.append(batch)
        return ToyPlan(
            slots=batch.slots.push(batch.num_tokens).clone(),
            table=batch.table.push(n).tolist(),
            query_start=batch.query_start.push(n + 1).tolist(),
            seq_len=batch.seq_len.push(n).tolist(),
            block_size=self.block_size,
        )


class ToyAttention:
    """Stores token ids as keys; a query's output is the checksum of all ids up to and including its own."""

    name = "toy"

    def can_run(self, need: AttnNeed, device: DeviceInfo) -> str | None:
        return None

    def block_sizes(self, need: AttnNeed) -> tuple[int, ...]:
        return (4, 1, 2, 8, 16)

    def kv_shape(self, need: AttnNeed, num_blocks: int) -> tuple[int, ...]:
        return (2, num_blocks * need.block_size, need.num_kv_heads, need.head_dim)

    def planner(self, need: AttnNeed, limits: StepLimits, platform: Platform) -> ToyPlanner:
        return ToyPlanner(need.block_size)

    def write_kv(self, k: Tensor, v: Tensor, kv: Tensor, slots: Tensor) -> None:
        kept = slots >= 0
        kv[0, slots[kept]], kv[1, slots[kept]] = k[kept], v[kept]

    def forward(self, q: Tensor, kv: Tensor, plan: ToyPlan, scale: float, out: Tensor) -> None:
        keys = kv[0, :, 0, 0].tolist()
        for row, (first, last) in enumerate(zip(plan.query_start, plan.query_start[1:], strict=False)):
            length = plan.seq_len[row]
            slots = [
                plan.table[row][i // plan.block_size] * plan.block_size + i % plan.block_size for i in range(length)
            ]
            sums = checksums([keys[slot] for slot in slots])
            out[first:last] = torch.tensor(sums[length - (last - first) :], dtype=out.dtype)[:, None, None]


def checksums(tokens: Sequence[float]) -> list[float]:
    """The token that follows each prefix of `tokens`. NaN stays NaN."""
    value, found = 7.0, []
    for token in tokens:
        value = (value * 31 + token + 1) % TOY_VOCAB
        found.append(value)
    return found


class ToyModel:
    """Logits peak at the checksum of the row's tokens; NaN where the cache held NaN."""

    def __init__(self, info: ModelInfo, backend: ToyAttention) -> None:
        self.info, self.backend = info, backend
        self.groups = {layer: g for g, (_, layers) in enumerate(info.kv_groups()) for layer in layers}

    def forward(self, x: StepInputs) -> Tensor:
        ids = x.token_ids.to(torch.float32)[:, None, None]
        outs = []
        for layer, group in sorted(self.groups.items()):
            self.backend.write_kv(ids, ids, x.kv[layer], x.attn[group].slots)
            out = torch.empty_like(ids)
            self.backend.forward(ids, x.kv[layer], x.attn[group], 1.0, out)
            outs.append(out[:, 0])
        assert all(torch.equal(out.nan_to_num(), outs[0].nan_to_num()) for out in outs), "all layers read the same"
        return outs[0]

    def logits(self, hidden: Tensor) -> Tensor:
        distance = (torch.arange(self.info.vocab_size, device=hidden.device) - hidden).abs()
        return -torch.minimum(distance, TOY_VOCAB - distance)


def toy_info(block_size: int = 4, num_layers: int = 2) -> ModelInfo:
    need = AttnNeed(
        head_dim=1, num_q_heads=1, num_kv_heads=1, dtype="float32", kv_dtype="float32", block_size=block_size
    )
    return ModelInfo(
        architecture="Toy",
        vocab_size=TOY_VOCAB,
        hidden_size=1,
        layers=tuple(LayerInfo(i, need) for i in range(num_layers)),
        max_length=512,
        dtype="float32",
        num_parameters=0,
        eos_token_ids=(0,),
    )


def toy_model(block_size: int = 4, num_layers: int = 2) -> LoadedModel:
    info = toy_info(block_size, num_layers)
    return LoadedModel(ToyModel(info, ToyAttention()), info, 0)

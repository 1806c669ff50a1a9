"""A model and an attention backend small enough to reason about: the next token is a checksum of what is read from KV.

Any error in slots, tables, positions or row order changes the checksum, so tokens are compared, not tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from lmkit.api import (
    AttnBatch,
    AttnNeed,
    Collectives,
    DeviceInfo,
    LayerInfo,
    ModelInfo,
    NullCollectives,
    NullEvent,
    NullGraphs,
    Platform,
    StateBatch,
    StateTensor,
    StepInputs,
    StepLimits,
)
from lmkit_worker.loaded import LoadedModel
from torch import Tensor

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

    def bind(self, rank: int, threads: int | None = None) -> torch.device:
        return torch.device("cpu")

    def free_memory(self) -> int:
        return self.memory

    def measure(self, work: Callable[[], None]) -> None:
        """Steps are estimated."""

    def defaults(self, model: ModelInfo, device: DeviceInfo) -> dict[str, object]:
        return {}

    def upload(self, source: Tensor) -> Tensor:
        return source

    def buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> ToyBuffer:
        return ToyBuffer(shape, dtype)

    def event(self) -> NullEvent:
        return NullEvent()

    def graphs(self, limits: StepLimits) -> NullGraphs:
        return NullGraphs()

    def collectives(self, rank: int, size: int, init_method: str = "") -> Collectives:
        return NullCollectives()


@dataclass(slots=True)
class ToyPlan:
    """Host copies of one step's batch."""

    slots: Tensor
    table: list[list[int]]
    query_start: list[int]
    seq_len: list[int]
    need: AttnNeed
    tree: list[int] | None  # as in AttnBatch


class ToyPlanner:
    capture: Literal["none", "decode", "any"] = "none"

    def __init__(self, need: AttnNeed) -> None:
        self.need = need

    def plan(self, batch: AttnBatch) -> ToyPlan:
        n = batch.num_rows
        return ToyPlan(
            slots=batch.slots.push(batch.num_tokens).clone(),
            table=batch.table.push(n).tolist(),
            query_start=batch.query_start.push(n + 1).tolist(),
            seq_len=batch.seq_len.push(n).tolist(),
            need=self.need,
            tree=batch.tree.push(batch.num_tokens).tolist() if batch.tree is not None else None,
        )


class ToyAttention:
    """Stores token ids as keys; a query's output is the checksum of the ids it may see, its own included."""

    name = "toy"

    def can_run(self, need: AttnNeed, device: DeviceInfo) -> str | None:
        return None

    def block_sizes(self, need: AttnNeed) -> tuple[int, ...]:
        return (4, 1, 2, 8, 16)

    def kv_shape(self, need: AttnNeed, num_blocks: int) -> tuple[int, ...]:
        return (2, num_blocks * need.block_size, need.num_kv_heads, need.head_dim)

    def planner(self, need: AttnNeed, limits: StepLimits, platform: Platform) -> ToyPlanner:
        return ToyPlanner(need)

    def write_kv(self, k: Tensor, v: Tensor, kv: Tensor, slots: Tensor) -> None:
        kept = slots >= 0
        kv[0, slots[kept]], kv[1, slots[kept]] = k[kept], v[kept]

    def move_kv(self, kv: Tensor, need: AttnNeed, sources: Tensor, targets: Tensor) -> None:
        kv[:, :, targets] = kv[:, :, sources]

    def forward(self, q: Tensor, kv: Tensor, plan: Any, scale: float, out: Tensor, sinks: Tensor | None = None) -> None:
        keys, size = kv[0, :, 0, 0].tolist(), plan.need.block_size
        for row, (first, last) in enumerate(zip(plan.query_start, plan.query_start[1:], strict=False)):
            start = plan.seq_len[row] - (last - first)
            for i in range(last - first):
                end = start + i + 1
                seen: Sequence[int] = range(max(0, end - (plan.need.window or end)), end)
                if plan.tree is not None:
                    seen = [p for p in seen if plan.tree[first + i] >> min(plan.seq_len[row] - 1 - p, 64) & 1]
                places = [divmod(p, size) for p in seen]
                out[first + i] = checksum([keys[plan.table[row][block] * size + offset] for block, offset in places])


def checksum(tokens: Sequence[float]) -> float:
    """A token that depends on each of `tokens` and their order. NaN stays NaN."""
    value = 7.0
    for token in tokens:
        value = (value * 31 + token + 1) % TOY_VOCAB
    return value


RECURRENT = 0  # among windows: a layer that keeps the checksum itself, of all tokens so far


def toy_next(tokens: Sequence[int], windows: Sequence[int | None] = (None,)) -> int:
    """The token that follows."""
    return int(sum(checksum(tokens[-(window or len(tokens)) :]) for window in windows) % TOY_VOCAB)


def toy_tokens(prompt: Sequence[int], n: int, windows: Sequence[int | None] = (None,)) -> list[int]:
    """The `n` tokens with which the toy model continues `prompt`."""
    tokens = list(prompt)
    for _ in range(n):
        tokens.append(toy_next(tokens, windows))
    return tokens[len(prompt) :]


STATE = (StateTensor("sum", ()),)


class ToyModel:
    """Logits peak at the sum of the checksums of the KV groups; NaN where a cache held NaN."""

    def __init__(self, info: ModelInfo, backend: ToyAttention) -> None:
        self.info, self.backend = info, backend
        self.groups = [layers for _, layers in info.kv_groups()]

    def forward(self, x: StepInputs) -> Tensor:
        ids = x.token_ids.to(torch.float32)[:, None, None]
        total = torch.zeros(len(ids), 1)
        for group, layers in enumerate(self.groups):
            outs = []
            for layer in layers:
                self.backend.write_kv(ids, ids, x.kv[layer], x.attn[group].slots)
                outs.append(torch.empty_like(ids))
                self.backend.forward(ids, x.kv[layer], x.attn[group], 1.0, outs[-1])
            assert all(torch.equal(out.nan_to_num(), outs[0].nan_to_num()) for out in outs), "layers of a group agree"
            total += outs[0][:, 0]
        if x.state is not None:
            states = [x.state.tensors[layer]["sum"] for layer in self.info.recurrent]
            outs = [self.recur(x.token_ids, x.state, state) for state in states]
            assert all(torch.equal(out.nan_to_num(), outs[0].nan_to_num()) for out in outs), "layers of a group agree"
            total += outs[0][:, None]
        return total % TOY_VOCAB

    def recur(self, ids: Tensor, batch: StateBatch, state: Tensor) -> Tensor:
        """The checksum so far at each token: [T]."""
        decodes = [(slot, i, i + 1) for i, slot in enumerate(batch.slots[: batch.num_decode_rows].tolist())]
        out = torch.empty(len(ids))
        for slot, first, end in [*decodes, *batch.prompts]:
            for i in range(first, end):
                state[slot] = ((state[slot] + 7) * 31 + ids[i] + 1) % TOY_VOCAB - 7  # an empty text's is 7, a zero here
                out[i] = (state[slot] + 7) % TOY_VOCAB
        return out

    def logits(self, hidden: Tensor) -> Tensor:
        distance = (torch.arange(self.info.vocab_size, device=hidden.device) - hidden).abs()
        return -torch.minimum(distance, TOY_VOCAB - distance)


def toy_info(block_size: int = 4, windows: Sequence[int | None] = (None, None)) -> ModelInfo:
    """One layer per entry of `windows`."""
    need = AttnNeed(1, 1, 1, dtype="float32", kv_dtype="float32", block_size=block_size)
    return ModelInfo(
        architecture="Toy",
        vocab_size=TOY_VOCAB,
        hidden_size=1,
        layers=tuple(
            LayerInfo(i, state=STATE) if window == RECURRENT else LayerInfo(i, replace(need, window=window))
            for i, window in enumerate(windows)
        ),
        max_length=512,
        dtype="float32",
        num_parameters=0,
        eos_token_ids=(0,),
    )


def toy_model(block_size: int = 4, windows: Sequence[int | None] = (None, None)) -> LoadedModel:
    info = toy_info(block_size, windows)
    return LoadedModel(ToyModel(info, ToyAttention()), info, 0)

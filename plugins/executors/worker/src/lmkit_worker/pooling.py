"""Pooling: hidden states of prompts become vectors. Partial sums wait here while a prompt takes several steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
from lmkit.api import GrammarMasks, NewRow, Pooled, PoolerInfo, PoolingParams, Reduction, StepResult
from torch import Tensor, nn
from torch.nn import functional as F

if TYPE_CHECKING:
    from lmkit.api import Model

    from lmkit_worker.inputs import Step
    from lmkit_worker.rows import RowTable


@dataclass(slots=True)
class _Partial:
    """The state of a row so far: hidden states of all tokens, or by reduction a state, sum or maximum [1, D]."""

    params: PoolingParams
    tokens: list[Tensor] = field(default_factory=list)
    reduced: dict[str, Tensor] = field(default_factory=dict)


class RowPooler:
    """The head of a pooling model. Independent of how prompts are cut into steps."""

    def __init__(self, info: PoolerInfo, rows: RowTable, model: Model, dense: nn.Module | None) -> None:
        self.info, self.rows, self.model, self.dense = info, rows, model, dense
        self._partial: dict[int, _Partial] = {}  # by slot

    def add(self, slot: int, row: NewRow) -> None:
        assert row.pooling is not None, f"row {row.id} wants tokens of a pooling model"
        self._partial[slot] = _Partial(row.pooling)

    def remove(self, slot: int) -> None:
        self._partial.pop(slot, None)

    @property
    def slots(self) -> list[int]:
        return sorted(self._partial)

    def clear(self) -> None:
        self._partial.clear()

    def prepare(self, step: Step) -> None:
        step.inputs.only_logits = False

    @property
    def reads_tokens(self) -> bool:
        return False

    def start(
        self, step: Step, hidden: Tensor, masks: GrammarMasks | None, result: StepResult
    ) -> tuple[Callable[[], None], None]:
        """The vectors of the rows whose prompt ends in this step. hidden [T, D]."""
        done: list[tuple[int, PoolingParams]] = []  # row of the plan
        reduced: list[Tensor] = []  # [number of reductions, D], or [N, D] for token tasks
        first = 0
        for row, work in enumerate(step.plan.rows):
            slot, states = int(step.slots[row]), hidden[first : first + work.num_tokens]
            first += work.num_tokens
            length, partial = int(self.rows.num_prompt[slot]), self._partial[slot]
            self._take(partial, states, work.start)
            if work.start + work.num_tokens == length:
                done.append((row, partial.params))
                reduced.append(self._reduced(partial, length).to(hidden.dtype))
        if not done:
            return lambda: None, None
        vectors = self.model.logits(torch.cat(reduced))  # the head runs once for all rows
        parts = vectors.split([len(r) for r in reduced])
        joined = [
            part if params.task.startswith("token_") else part.reshape(1, -1)
            for (_, params), part in zip(done, parts, strict=True)
        ]
        vectors = torch.cat(joined)
        if self.dense is not None:
            vectors = self.dense(vectors)
        parts = vectors.float().split([len(part) for part in joined])
        found = [
            (row, params, self._finished(part, params).to("cpu", non_blocking=True))
            for (row, params), part in zip(done, parts, strict=True)
        ]

        def finish() -> None:
            for row, params, vector in found:
                values = vector.numpy().astype("<f4")
                if np.isfinite(values).all():
                    shape = values.shape if params.task.startswith("token_") else values.shape[1:]
                    result.pooled.append((row, Pooled(values.tobytes(), shape)))
                else:
                    result.faults.append((row, "its vector is not finite"))

        return finish, None

    def _take(self, partial: _Partial, states: Tensor, start: int) -> None:
        """Adds the hidden states [n, D] of positions from `start` on."""
        if partial.params.task.startswith("token_"):
            partial.tokens.append(states)
            return
        for reduction in self.info.reductions:
            before = partial.reduced.get(reduction)
            match reduction:
                case "cls":
                    now = states[:1] if before is None else before
                case "last":
                    now = states[-1:]
                case "max":
                    top = states.amax(0, keepdim=True)
                    now = top if before is None else torch.maximum(before, top)
                case _:
                    total = self._weighted(reduction, states, start).sum(0, keepdim=True)
                    now = total if before is None else before + total
            partial.reduced[reduction] = now

    @staticmethod
    def _weighted(reduction: Reduction, states: Tensor, start: int) -> Tensor:
        """float32; positions count from 1."""
        if reduction != "weighted_mean":
            return states.float()
        weights = torch.arange(start + 1, start + len(states) + 1, device=states.device)
        return states.float() * weights[:, None]

    def _reduced(self, partial: _Partial, length: int) -> Tensor:
        if partial.tokens:
            return torch.cat(partial.tokens)
        over = {"mean": length, "mean_sqrt": length**0.5, "weighted_mean": length * (length + 1) / 2}
        states = [partial.reduced[reduction] / over.get(reduction, 1) for reduction in self.info.reductions]
        return torch.cat([state.float() for state in states])

    def _finished(self, values: Tensor, params: PoolingParams) -> Tensor:
        """[N, size] float32: cut, scaled or activated."""
        info, active = self.info, params.activation is not False
        if params.dimensions is not None:
            values = values[:, : params.dimensions]
        if info.task in ("embed", "token_embed"):
            return F.normalize(values, dim=-1) if info.normalize and active else values
        match info.activation if active else "none":
            case "softmax":
                return values.softmax(-1)
            case "sigmoid":
                return values.sigmoid()
        return values

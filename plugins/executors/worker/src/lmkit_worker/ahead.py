"""Steps of one token a row that follow one another: where their tokens stand is known before the first of them runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from lmkit.api import StepInputs

if TYPE_CHECKING:
    from lmkit_worker.inputs import InputBuilder


class Ahead:
    """Fills an InputBuilder's buffers for such steps: for the first from the host, for each other from what was written
    down for it, by operators that a captured graph may hold."""

    def __init__(self, inputs: InputBuilder, most: int) -> None:
        """`most`: how many steps may follow one another."""
        rows = inputs.limits.max_rows
        self._inputs = inputs
        self._targets = [inputs.positions, inputs.seq_len, *inputs.slots]
        self._written = [np.zeros((most, rows), buffer.array.dtype) for buffer in self._targets]
        self._later = [torch.from_numpy(array) for array in self._written]

    def begin(
        self, slots: np.ndarray, positions: np.ndarray, places: np.ndarray, num_steps: int, token_ids: torch.Tensor
    ) -> StepInputs:
        """The first step: tokens at `positions` [R] of `slots` [R], in the others those behind. What stands beyond
        `places` [R], how many the row has blocks for, is kept nowhere. `token_ids` [R] are the caller's to fill."""
        inputs, n = self._inputs, len(slots)
        at = positions + np.arange(num_steps)[:, None]
        lengths = np.minimum(at + 1, places)
        values = [at, lengths]
        for group, spec in enumerate(inputs.specs):
            blocks, offsets = np.divmod(np.minimum(at, places - 1), spec.block_size)
            held = inputs.rows.table[group][slots, blocks].astype(np.int64) * spec.block_size + offsets
            values.append(np.where(at < places, held, -1))
            inputs.tables[group].fill(slots)
        for target, written, value in zip(self._targets, self._written, values, strict=True):
            written[:num_steps, :n] = value
            target.array[:n] = value[0]
        inputs.query_start.array[: n + 1] = inputs.arange[: n + 1]
        for batch in inputs.batches:
            batch.num_rows = batch.num_decode_rows = batch.num_tokens = n
            batch.max_query, batch.max_seq = 1, int(lengths[-1].max())
        attn = [planner.plan(batch) for planner, batch in zip(inputs.planners, inputs.batches, strict=True)]
        inputs.logits_rows.array[:n] = inputs.arange[:n]
        return StepInputs(
            token_ids, inputs.positions.push(n), attn, inputs.kv, inputs.logits_rows.push(n),
            capture=inputs.captures_drafts,
        )  # fmt: skip

    def advance(self, x: StepInputs, number: int) -> None:
        """Makes `x` the step `number`, from 1, behind the first."""
        inputs, n = self._inputs, len(x.token_ids)
        for target, later in zip(self._targets, self._later, strict=True):
            target.buffer.host[:n].copy_(later[number, :n])
        x.positions = inputs.positions.push(n)
        x.attn = [planner.plan(batch) for planner, batch in zip(inputs.planners, inputs.batches, strict=True)]

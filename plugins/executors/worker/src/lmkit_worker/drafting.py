"""Where guesses are from: the texts of rows, or a model that runs over the tokens of each step and on from there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

if TYPE_CHECKING:
    from lmkit.api import Graphs, Proposer, StepInputs, StepResult
    from lmkit_layers.drafts import DraftProposer
    from torch import Tensor

    from lmkit_worker.inputs import InputBuilder, Layout, Step
    from lmkit_worker.rows import RowTable


class Source(Protocol):
    """Who guesses for the rows of a step, once its tokens are known."""

    name: str
    reads_hidden: bool  # it needs the hidden states of all tokens of a step
    branches: bool  # what it guesses is a tree: `StepResult.parents`

    def guess(
        self, step: Step, hidden: Tensor, result: StepResult, asked: Sequence[int], most: Sequence[int]
    ) -> list[list[int]]:
        """What may follow the rows `asked` of the plan. Called after every step, also if none is asked."""
        ...


class Texts:
    """A proposer that reads the texts of rows."""

    reads_hidden = branches = False

    def __init__(self, proposer: Proposer, rows: RowTable) -> None:
        self.proposer, self._rows, self.name = proposer, rows, type(proposer).__name__

    def guess(
        self, step: Step, hidden: Tensor, result: StepResult, asked: Sequence[int], most: Sequence[int]
    ) -> list[list[int]]:
        """Contract: Source."""
        return self.proposer.propose([self._rows.row_tokens(step.slots[row]) for row in asked], most) if asked else []


class Drafting:
    """A proposer that runs a model: first over what the step computed, then over one guess of each row at a time.

    The first pass writes the draft's keys and values of the step's tokens, whoever is asked: what the prefix cache
    finds later has them. Those of guesses are written behind, as far as the row has blocks, and again when they are
    known.
    """

    branches = False

    def __init__(
        self, proposer: DraftProposer, rows: RowTable, inputs: InputBuilder, graphs: Graphs, num_layers: int
    ) -> None:
        """`num_layers` of the draft; `graphs` are its own."""
        self.proposer, self.name, self.reads_hidden = proposer, type(proposer).__name__, proposer.reads_hidden
        self._rows, self._inputs, self._graphs, self._num_layers = rows, inputs, graphs, num_layers
        self._sizes = [spec.block_size for spec in inputs.specs]
        self._entering: dict[int, Tensor] = {}  # by number of tokens, where graphs expect it

    def guess(
        self, step: Step, hidden: Tensor, result: StepResult, asked: Sequence[int], most: Sequence[int]
    ) -> list[list[int]]:
        """Contract: Source."""
        slots = step.slots[list(asked)]
        known = self._rows.num_tokens[slots]
        starts = np.array([work.start for work in step.plan.rows], np.int64)
        firsts = np.cumsum([0, *(work.num_tokens for work in step.plan.rows)])[:-1]
        state = self._follow(step, hidden, (firsts - starts)[list(asked)] + known - 2)
        if not asked:
            return []
        room = np.array([self._rows.room(slot, self._sizes) for slot in slots.tolist()]) - known + 1
        left = np.minimum(most, np.maximum(room + self.reads_hidden, 0))
        active = np.flatnonzero(left) if self._num_layers else np.arange(len(asked))
        found: list[tuple[np.ndarray, Tensor]] = []
        num = 0  # guessed of each row
        if not self.reads_hidden and len(active):
            last = self._rows.tokens[slots[active], known[active] - 1].astype(np.int64)
            state = self._next(slots[active], known[active] - 1, torch.from_numpy(last).to(hidden.device), None)
        while len(active):
            ids = self.proposer.guess(state)
            found.append((active, ids))
            num += ids.shape[1]
            keep = left[active] > num
            if not self._num_layers or not keep.any():
                break
            if not keep.all():
                rows = torch.from_numpy(np.flatnonzero(keep)).to(ids.device)
                active, ids, state = active[keep], ids[rows], state[rows]
            state = self._next(slots[active], known[active] - 1 + num - self.reads_hidden, ids[:, -1], state)
        return _by_row(found, len(asked))

    def _follow(self, step: Step, hidden: Tensor, last: np.ndarray) -> Tensor:
        """Runs over the step's tokens. The state at `last` [S], the last places of rows whose next token is known."""
        return self._pass(step.inputs, step.layout, hidden, last)

    def _pass(self, x: StepInputs, layout: Layout, hidden: Tensor, last: np.ndarray) -> Tensor:
        """Runs over known tokens where `layout` says, of the model's hidden states there [T, H]. As `_follow`."""
        ids = x.token_ids[: len(layout.positions)]
        if self.reads_hidden:
            following = self._rows.tokens[layout.token_slots, layout.positions + 1].astype(np.int64)
            ids = torch.from_numpy(following).to(ids.device)
        rows = torch.from_numpy(last if self.reads_hidden else last[:0]).to(ids.device)
        entering = self.proposer.enter(ids, hidden if self.reads_hidden else None)
        if x.capture:
            return self._graphs.run(self.proposer.state, replace(x, embeds=self._keep(entering, x)))[rows]
        x = replace(x, token_ids=ids, embeds=entering, logits_rows=rows, only_logits=len(rows) < len(ids))
        state = self.proposer.state(x)
        return state if len(state) == len(rows) else state[rows]

    def _keep(self, entering: Tensor | None, x: StepInputs) -> Tensor | None:
        """`entering` where graphs expect it."""
        if entering is None:
            return None
        n = len(x.token_ids)
        kept = self._entering.get(n)
        if kept is None:
            kept = self._entering[n] = entering.new_zeros(n, entering.shape[1])
        kept[: len(entering)].copy_(entering)
        return kept

    def _next(self, slots: np.ndarray, positions: np.ndarray, ids: Tensor, state: Tensor | None) -> Tensor:
        """The state [R, D] after one more token `ids` [R] of each row, at `positions`."""
        n, x = len(slots), self._inputs.one_each(slots, positions, self._graphs)
        x.token_ids[:n].copy_(ids)
        x.embeds = self._keep(self.proposer.enter(ids, state), x)
        return self._graphs.run(self.proposer.state, x)[:n]


def _by_row(found: Sequence[tuple[np.ndarray, Tensor]], num_rows: int) -> list[list[int]]:
    """The guesses [A, K] of each round, of the rows that were active in it, as one list for each row."""
    guesses: list[list[int]] = [[] for _ in range(num_rows)]
    if not found:
        return guesses
    flat, at = torch.cat([ids.flatten() for _, ids in found]).tolist(), 0
    for active, ids in found:
        for row in active.tolist():
            guesses[row] += flat[at : (at := at + ids.shape[1])]
    return guesses

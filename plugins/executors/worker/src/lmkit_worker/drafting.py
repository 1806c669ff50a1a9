"""Where guesses are from: the texts of rows, or a model that runs over the tokens of each step and on from there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from lmkit.api import PluginError

from lmkit_worker.ahead import Ahead
from lmkit_worker.along import Along

if TYPE_CHECKING:
    from lmkit.api import Graphs, Proposer, StepInputs, StepResult
    from lmkit_layers.drafts import DraftProposer
    from torch import Tensor

    from lmkit_worker.inputs import InputBuilder, Step
    from lmkit_worker.rows import RowTable


class Source(Protocol):
    """Who guesses for the rows of a step, once its tokens are known."""

    name: str
    reads_hidden: bool  # it needs the hidden states of all tokens of a step
    branches: bool  # what it guesses is a tree: `StepResult.parents`
    hopeless: bool  # set by who asks: hardly a guess comes true, so next to nothing is made ready for more

    def guess(
        self, step: Step, hidden: Tensor, result: StepResult, asked: Sequence[int], most: Sequence[int]
    ) -> list[list[int]]:
        """What may follow the rows `asked` of the plan. Called after every step, also if none is asked, but for those
        of a long rest."""
        ...

    def rest(self) -> None:
        """Nobody asks for a long while, and no step is told until shortly before."""
        ...


class Texts:
    """A proposer that reads the texts of rows."""

    reads_hidden = branches = hopeless = False

    def __init__(self, proposer: Proposer, rows: RowTable) -> None:
        self.proposer, self._rows, self.name = proposer, rows, type(proposer).__name__

    def guess(
        self, step: Step, hidden: Tensor, result: StepResult, asked: Sequence[int], most: Sequence[int]
    ) -> list[list[int]]:
        """Contract: Source."""
        if not asked:
            return []
        found = self.proposer.propose([self._rows.row_tokens(step.slots[row]) for row in asked], most)
        try:
            return [[int(token) for token in guess] for _, guess in zip(asked, found, strict=True)]
        except Exception as e:
            raise PluginError(f"{self.name}: propose gave {found!r:.80}, no list of token ids for each text") from e

    def rest(self) -> None:
        """Nothing is kept of steps."""


class Drafting:
    """A proposer that runs a model: first along what the steps computed, then over one guess of each row at a time.

    Keys and values of guesses are written behind those of known tokens, as far as the row has blocks, and again when
    they are known. Both passes may be graphs: what they read lies where it lay.
    """

    branches = hopeless = False

    def __init__(
        self, proposer: DraftProposer, rows: RowTable, inputs: InputBuilder, graphs: Graphs, num_layers: int, most: int
    ) -> None:
        """`num_layers` of the draft; `graphs` are its own; `most` guesses of a row."""
        self.proposer, self.name, self.reads_hidden = proposer, type(proposer).__name__, proposer.reads_hidden
        self._rows, self._inputs, self._graphs, self._num_layers = rows, inputs, graphs, num_layers
        self._sizes = np.array([spec.block_size for spec in inputs.specs])
        self._ahead, self._along = Ahead(inputs, most), Along(proposer, rows, inputs)
        self._chains = [partial(self._chain, num) for num in range(most + 1)]
        self._follows = self._read  # one object, of which graphs are captured
        limits = inputs.limits
        self._following, self._last = (inputs.buffer((n,), torch.int64) for n in (limits.max_tokens, limits.max_rows))
        self._kept: dict[str, Tensor] = {}  # what graphs read and leave, by name

    def guess(
        self, step: Step, hidden: Tensor, result: StepResult, asked: Sequence[int], most: Sequence[int]
    ) -> list[list[int]]:
        """Contract: Source."""
        if not asked and (not self._num_layers or self._along.put_off(step, hidden, self.hopeless)):
            return []
        slots = step.slots[list(asked)]
        known = self._rows.num_tokens[slots]
        if self._along.behind:
            self._along.catch_up()
            state = self._along.follow(step, hidden, result, asked if self.reads_hidden else [])
            found = self._found(state) if len(state) else state
        else:
            starts = np.array([work.start for work in step.plan.rows], np.int64)
            found = self._follow(step, hidden, (step.layout.query_start[:-1] - starts)[list(asked)] + known - 2)
        if not asked:
            return []
        places = self._rows.room(slots, self._sizes)
        left = np.minimum(most, np.maximum(places - known + 1 + self.reads_hidden, 0))
        if not self._num_layers:
            return found.tolist()
        if not self.reads_hidden:
            last = self._rows.tokens[slots, known - 1].astype(np.int64)
            self._keep("ids", torch.from_numpy(last).to(hidden.device))
        guesses = found.tolist() if self.reads_hidden else [[] for _ in asked]
        num = int(left.max()) - self.reads_hidden
        if num > 0:
            x = self._ahead.begin(slots, known - 1, places, num, self._kept["ids"][: len(slots)])
            x.embeds = self._kept["state"][: len(slots)] if self.reads_hidden else None
            more = self._graphs.run(self._chains[num], x).tolist()
            guesses = [a + b for a, b in zip(guesses, more, strict=True)]
        return [row[:limit] for row, limit in zip(guesses, left.tolist(), strict=True)]

    def rest(self) -> None:
        """Contract: Source."""
        self._along.forget()

    def _follow(self, step: Step, hidden: Tensor, last: np.ndarray) -> Tensor:
        """Runs over the step's tokens. Guesses [S, K] for the rows whose next token is known, which stand at `last`
        [S] of the step; none if the proposer reads no hidden states."""
        x, layout = step.inputs, step.layout
        ids, embeds, num = x.token_ids[: len(layout.positions)], None, 0
        if self.reads_hidden:
            num = len(last)
            self._following.array[: len(ids)] = self._rows.tokens[layout.token_slots, layout.positions + 1]
            ids, embeds = self._following.push(len(ids)), self._keep("hidden", hidden) if x.capture else hidden
        self._last.array[:num] = last[:num]
        some = num < len(ids) and (num > 0 or not x.capture)  # what reads no row at all is no operator
        x = replace(x, token_ids=ids, embeds=embeds, logits_rows=self._last.push(num), only_logits=some)
        return self._graphs.run(self._follows, x)

    def _chain(self, num: int, x: StepInputs) -> Tensor:
        """Guesses [R, num], of `num` steps that follow one another."""
        found = []
        for i in range(num):
            if i:
                self._ahead.advance(x, i)
            found.append(self._read(x))
        return torch.cat(found, 1)

    def _read(self, x: StepInputs) -> Tensor:
        """One pass. The guesses [S, K] for `x.logits_rows`; what the next goes on from is kept."""
        x = replace(x, embeds=self.proposer.enter(x.token_ids, x.embeds))
        num, state = len(x.logits_rows), self.proposer.state(x)
        if not num:
            return x.token_ids[:0].view(0, 1)
        return self._found(state if len(state) == num else state[x.logits_rows])

    def _found(self, state: Tensor) -> Tensor:
        """The guesses [S, K] after states [S, D]."""
        ids = self.proposer.guess(state)
        if self._num_layers:
            self._keep("ids", ids[:, -1])
            self._keep("state", state)
        return ids

    def _keep(self, name: str, values: Tensor) -> Tensor:
        """`values` [N, ...] where graphs expect them."""
        kept = self._kept.get(name)
        if kept is None:
            limits = self._inputs.limits
            num = limits.max_tokens if name == "hidden" else limits.max_rows
            kept = self._kept[name] = values.new_zeros(num, *values.shape[1:])
        kept[: len(values)].copy_(values)
        return kept[: len(values)]

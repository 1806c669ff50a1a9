"""A draft runs along the tokens that the model has computed: at once where guesses are asked for, else later."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

if TYPE_CHECKING:
    from lmkit.api import StepResult
    from lmkit_layers.drafts import DraftProposer
    from torch import Tensor

    from lmkit_worker.inputs import InputBuilder, Step
    from lmkit_worker.rows import RowTable

BEHIND = 32  # tokens of a row that a draft may not have run over


class PutOff(NamedTuple):
    """The tokens of a step."""

    slots: np.ndarray  # [T] of their rows
    turns: np.ndarray  # [T] of the slots
    positions: np.ndarray  # [T]
    hidden: Tensor | None  # [T, H] of the model, if the draft reads them


class Along:
    """Runs over tokens that are known with the model's hidden states there, and writes the draft's keys and values.

    Steps of prompts and with drafts are followed at once: what the prefix cache finds later has them. Steps of one
    token a row are put off while nobody asks for guesses, and run over together once somebody does or they become too
    many. While hardly a guess comes true prompts are put off as well, and what becomes too much is forgotten.
    """

    def __init__(self, proposer: DraftProposer, rows: RowTable, inputs: InputBuilder) -> None:
        self._proposer, self._rows, self._inputs = proposer, rows, inputs
        windows = [spec.window for spec in inputs.specs if spec.window is not None]
        self._longest = min([BEHIND, *windows])  # what leaves a window may be another row's when it is written
        self._can_wait = not windows  # prompts can
        self._steps: list[PutOff] = []
        self._num = 0  # tokens put off

    @property
    def behind(self) -> bool:
        """Whether any tokens were put off."""
        return bool(self._steps)

    def put_off(self, step: Step, hidden: Tensor, hopeless: bool) -> bool:
        """Keeps the hidden states of a step that nobody waits for. False: it must be followed."""
        places, slots = step.layout.positions, step.layout.token_slots
        num = len(places)
        if step.num_drafts is not None or num > self._inputs.limits.max_tokens:
            return False
        if not num == len(step.slots) == len(step.sample_rows) and not (hopeless and self._can_wait):
            return False
        if len(self._steps) == self._longest or self._num + num > self._inputs.limits.max_tokens:
            (self.forget if hopeless else self.catch_up)()
        kept = hidden[:num].clone() if self._proposer.reads_hidden else None  # it may lie where the next step's will
        self._steps.append(PutOff(slots, self._rows.turn[slots], places, kept))
        self._num += num
        return True

    def forget(self) -> None:
        """Never runs over what was put off."""
        self._steps, self._num = [], 0

    def catch_up(self) -> None:
        """Runs over all that was put off, of rows that are still there."""
        steps = self._steps
        self.forget()
        if not steps:
            return
        slots, turns, positions = (np.concatenate(parts) for parts in list(zip(*steps, strict=True))[:3])
        order = np.lexsort((positions, slots))
        order = order[(self._rows.turn[slots] == turns)[order]]
        if not len(order):
            return
        rows, begin, counts = np.unique(slots[order], return_index=True, return_counts=True)
        hidden = None
        if self._proposer.reads_hidden:
            hidden = torch.cat([each.hidden for each in steps if each.hidden is not None])
            hidden = hidden[_there(order, hidden)]
        self._run(rows, positions[order[begin]], counts, hidden, order[:0])

    def follow(self, step: Step, hidden: Tensor, result: StepResult, asked: Sequence[int]) -> Tensor:
        """Runs over the step's tokens; of drafts over those that were accepted, where they stand now.

        Returns the states [S, D] at the last places of the rows `asked` of the plan.
        """
        starts, lengths, tokens = known_tokens(step, result)
        last = (np.cumsum(lengths) - 1)[list(asked)]
        read = hidden[_there(tokens, hidden)] if self._proposer.reads_hidden else None
        return self._run(step.slots, starts, lengths, read, last)

    def _run(
        self, slots: np.ndarray, starts: np.ndarray, lengths: np.ndarray, hidden: Tensor | None, last: np.ndarray
    ) -> Tensor:
        x, layout = self._inputs.spans(slots, starts, lengths)
        ids = self._rows.tokens[layout.token_slots, layout.positions + self._proposer.reads_hidden]
        x.token_ids.copy_(torch.from_numpy(ids.astype(np.int64)))
        rows = torch.from_numpy(last).to(x.token_ids.device)
        embeds = self._proposer.enter(x.token_ids, hidden)
        x = replace(x, embeds=embeds, logits_rows=rows, only_logits=0 < len(last) < len(ids))
        state = self._proposer.state(x)
        return state if len(state) == len(last) else state[rows]


def known_tokens(step: Step, result: StepResult) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The first place of each row of a step [R], how many tokens there are known [R], and which of the step's these are
    [T]: all but the drafts that were wrong."""
    works, firsts = step.plan.rows, step.layout.query_start
    starts = np.array([work.start for work in works], np.int64)
    if step.num_drafts is None:
        return starts, np.diff(firsts), np.arange(firsts[-1])
    tokens = []
    for row, work in enumerate(works):
        first, num = firsts[row], work.num_tokens - len(work.drafts)
        right = step.kept[row] if row in step.kept else range(max(0, len(result.tokens[row]) - 1))
        tokens.append(first + np.array([*range(num), *(num + i for i in right)], np.int64))
    return starts, np.array([len(each) for each in tokens], np.int64), np.concatenate(tokens)


def _there(index: np.ndarray, values: Tensor) -> Tensor:
    return torch.from_numpy(index).to(values.device)

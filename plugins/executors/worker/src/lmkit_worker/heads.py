"""What becomes of the hidden states of a step: tokens, or vectors. The runner has one head and does not ask which."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from lmkit.api import GrammarMasks, NewRow, RowLogprobs, StepResult

from lmkit_worker import branches
from lmkit_worker.inputs import PromptJob, Step
from lmkit_worker.sampling import Drawn, SampleBatch, Sampled, Sampler, TokenChoice, accept, gather_logprobs
from lmkit_worker.sampling.noise import seed_of

if TYPE_CHECKING:
    from torch import Tensor

    from lmkit_worker.proposals import Proposals
    from lmkit_worker.rows import RowTable

PROMPT_ROWS = 64  # rows of logits made at once for prompt log-probabilities
Logits = Callable[["Tensor", Sequence[int]], "Tensor"]  # hidden states [N, D] of the slots of each -> [N, V]
Largest = Callable[["Tensor", Sequence[int]], "tuple[Tensor, Tensor]"]  # likewise -> tokens, and their logits: [N]


Move = Callable[[np.ndarray, np.ndarray, np.ndarray], None]  # as branches.Mover
Started = tuple[Callable[[], None], "Tensor | None"]


class RowHead(Protocol):
    """State by slot, added and removed with the row, and what a step says of its rows."""

    @property
    def slots(self) -> list[int]:
        """Slots that have state, ascending."""
        ...

    def add(self, slot: int, row: NewRow) -> None: ...
    def remove(self, slot: int) -> None: ...
    def clear(self) -> None:
        """Forgets all rows."""
        ...

    def prepare(self, step: Step) -> None:
        """Before the model runs: says in `step.inputs.only_logits` whether other hidden states are read."""
        ...

    @property
    def reads_tokens(self) -> bool:
        """Whether `start` needs to know all tokens drawn before it."""
        ...

    def start(self, step: Step, hidden: Tensor, masks: GrammarMasks | None, result: StepResult) -> Started:
        """Starts what is to be made of the hidden states: [T, D], or those of the logits rows alone.

        The first part of the answer fills `result`; it is called once, when the device has done what was started. The
        other is the tokens drawn [S] on the device, for a step that begins before they are read; None if it cannot.
        """
        ...


class TokenHead:
    """Draws tokens of the rows that sample and appends them to the rows; log-probabilities of prompts."""

    def __init__(
        self, sampler: Sampler, rows: RowTable, logits: Logits, largest: Largest, seed: int, move: Move,
        proposals: Proposals | None = None,
    ) -> None:  # fmt: skip
        """`seed` is for rows that have none of their own; `move` is what accepted drafts of a tree need."""
        self.sampler, self.rows, self.seed, self.move = sampler, rows, seed, move
        self.logits, self.largest, self.proposals = logits, largest, proposals
        self.reads_hidden = proposals is not None and proposals.source.reads_hidden
        self._prompt_slots: set[int] = set()  # slots whose rows want prompt log-probabilities

    @property
    def slots(self) -> list[int]:
        return [slot for slot, params in enumerate(self.sampler.params) if params is not None]

    def add(self, slot: int, row: NewRow) -> None:
        seed = row.params.seed if row.params.seed is not None else seed_of(row.id, self.seed)
        self.sampler.add(slot, row.params, self.rows.row_tokens(slot), row.num_prompt_tokens, seed)
        if row.params.prompt_logprobs is not None:
            self._prompt_slots.add(slot)
        if self.proposals is not None:
            self.proposals.add(slot)

    def remove(self, slot: int) -> None:
        self.sampler.remove(slot)
        self._prompt_slots.discard(slot)

    def clear(self) -> None:
        self._prompt_slots.clear()
        self.sampler.clear()

    def prepare(self, step: Step) -> None:
        if self._prompt_slots:
            step.prompt_jobs = self._jobs(step)
        if step.prompt_jobs or (self.reads_hidden and not self._rests(step)):  # these read other hidden states
            step.inputs.only_logits = False

    def _rests(self, step: Step) -> bool:
        return self.proposals is not None and self.proposals.rests(step)

    @property
    def reads_tokens(self) -> bool:
        return self.sampler.reads_tokens

    def start(self, step: Step, hidden: Tensor, masks: GrammarMasks | None, result: StepResult) -> Started:
        draws = len(step.sample_rows) > 0
        rows = step.inputs.logits_rows
        chosen = hidden if len(hidden) == len(rows) else hidden[rows]
        drawn = self._draw(step, chosen, masks) if draws else None
        turns = self.rows.turn[step.slots]

        def finish() -> None:
            live = self.rows.turn[step.slots] == turns
            if drawn is not None:
                sampled = drawn.read()
                self._accept(step, sampled, self._unsound(step, chosen, sampled), live, result)
            if self.proposals is not None:
                self.proposals.fill(step, hidden, result)
            for job in step.prompt_jobs:
                if live[job.row]:
                    self._prompt_logprobs(job, step, hidden, result)

        return finish, drawn.tokens if drawn is not None and step.num_drafts is None else None

    def _draw(self, step: Step, hidden: Tensor, masks: GrammarMasks | None) -> Drawn:
        slots = step.logit_slots.tolist()
        if self.sampler.takes_largest and not masks:
            drawn = Drawn(*self.largest(hidden, slots))
        else:
            drawn = self.sampler.sample(self.logits(hidden, slots), self._batch(step), masks)
        if step.num_drafts is None:
            self.rows.expect(step.logit_slots)
        return drawn

    def _batch(self, step: Step) -> SampleBatch:
        guessed = None
        if step.num_drafts is not None:
            works = [step.plan.rows[row] for row in step.sample_rows.tolist()]
            guessed = [path for work in works for path in branches.paths(work.drafts, work.parents)]
        return SampleBatch(step.logit_slots, step.positions, step.sample_rows, self._tokens, step.num_drafts, guessed)

    def _tokens(self, slot: int) -> list[int]:
        return self.rows.row_tokens(slot).tolist()

    def _unsound(self, step: Step, hidden: Tensor, sampled: Sampled) -> set[int]:
        """The rows of logits with a fault that is the model's own: their other faults are those of their parameters.

        Sampling overwrites logits, so these few are made once more.
        """
        if not (rows := list(sampled.faults)):
            return set()
        logits = self.logits(hidden[rows], step.logit_slots[rows].tolist())
        sound = logits.amax(-1).isfinite().tolist()
        return {row for row, fine in zip(rows, sound, strict=True) if not fine}

    def _accept(
        self, step: Step, sampled: Sampled, unsound: set[int], live: np.ndarray, result: StepResult
    ) -> None:  # fmt: skip
        """Verifies drafts, tells the rows what is accepted, and fills tokens, logprobs and faults.

        `live` [R]: rows of the plan that still are what they were when the step began.
        """
        rows, slots = step.sample_rows.tolist(), step.slots[step.sample_rows]
        drawn = sampled.tokens.tolist()
        if step.num_drafts is None:
            still = live[step.sample_rows]
            self.rows.read(slots[still], step.positions[still], sampled.tokens[still])
            firsts: Sequence[int] = range(len(rows))
            for row, token in zip(rows, drawn, strict=True):
                result.tokens[row] = [token]
        else:
            ends = np.cumsum(step.num_drafts + 1).tolist()
            firsts = [0, *ends[:-1]]
            for row, slot, first, end in zip(rows, slots.tolist(), firsts, ends, strict=True):
                work = step.plan.rows[row]
                if work.parents:
                    kept = step.kept[row] = branches.follow(drawn[first:end], work.drafts, work.parents)
                    tokens = [drawn[first], *(drawn[first + 1 + i] for i in kept)]
                else:
                    tokens = accept(drawn[first:end], work.drafts)
                result.tokens[row] = tokens
                self.rows.extend(slot, tokens)
            self._gather(step)
        if self.sampler.watched:
            for row, slot, first in zip(rows, slots.tolist(), firsts, strict=True):
                if live[row]:
                    end = int(step.positions[first]) + len(result.tokens[row])
                    self.sampler.observe(slot, result.tokens[row], end - int(self.rows.num_prompt[slot]))
        if not (sampled.logprobs or sampled.faults):
            return
        for row, first in zip(rows, firsts, strict=True):
            accepted: Sequence[int] = range(first, first + len(result.tokens[row]))
            if row in step.kept:
                accepted = [first, *(first + 1 + i for i in step.kept[row])]
            if bad := [i for i in accepted if i in sampled.faults]:
                # The row keeps its token: with two steps in flight it is computed once more before it is gone.
                result.tokens[row] = []
                (result.undrawn if unsound.isdisjoint(bad) else result.faults).append((row, sampled.faults[bad[0]]))
            elif found := [sampled.logprobs[i] for i in accepted if i in sampled.logprobs]:
                result.logprobs.append(RowLogprobs(row, found))

    def _gather(self, step: Step) -> None:
        """Puts the keys and values of accepted drafts that do not stand behind each other where they are looked for."""
        moves = []
        for row, kept in step.kept.items():
            work = step.plan.rows[row]
            first = work.start + work.num_tokens - len(work.drafts)
            moves += [(step.slots[row], first + i, first + j) for j, i in enumerate(kept) if i != j]
        if moves:
            self.move(*np.array(moves, np.int64).T)

    def _jobs(self, step: Step) -> list[PromptJob]:
        """Which hidden states of the step predict prompt tokens of rows that asked for prompt log-probabilities."""
        jobs, first = [], 0
        for row, work in enumerate(step.plan.rows):
            slot = step.slots[row]
            params = self.rows.params[slot]
            if params is not None and params.prompt_logprobs is not None:
                n = min(work.num_tokens, int(self.rows.num_prompt[slot]) - 1 - work.start)
                if n > 0:
                    targets = self.rows.tokens[slot, work.start + 1 : work.start + 1 + n].copy()
                    jobs.append(PromptJob(row, first, work.start, targets))
            first += work.num_tokens
        return jobs

    def _prompt_logprobs(self, job: PromptJob, step: Step, hidden: Tensor, result: StepResult) -> None:
        slot = int(step.slots[job.row])
        params = self.rows.params[slot]
        assert params is not None
        assert params.prompt_logprobs is not None
        entries = []
        for i in range(0, len(job.targets), PROMPT_ROWS):
            targets = job.targets[i : i + PROMPT_ROWS].tolist()
            first = job.hidden_start + i
            logits = self.logits(hidden[first : first + len(targets)], [slot] * len(targets))
            logprobs = torch.log_softmax(logits.float(), -1)
            entries += gather_logprobs(logprobs, [TokenChoice(t, params.prompt_logprobs) for t in targets])
        found = next((entry for entry in result.logprobs if entry.row == job.row), None)
        if found is None:
            found = RowLogprobs(job.row)
            result.logprobs.append(found)
        found.prompt_start, found.prompt = job.start + 1, entries


class Follower:
    """The head of a rank whose model has none: rows get the tokens that another rank has drawn."""

    reads_tokens = False

    def __init__(self, rows: RowTable) -> None:
        self.rows = rows
        self._steps: dict[int, tuple[np.ndarray, np.ndarray]] = {}  # slots of their rows, and the turns of these

    @property
    def slots(self) -> list[int]:
        return sorted(self.rows.slot_of.values())

    def add(self, slot: int, row: NewRow) -> None:
        """Nothing is kept of it."""

    def remove(self, slot: int) -> None:
        """Nothing was kept."""

    def clear(self) -> None:
        self._steps.clear()

    def prepare(self, step: Step) -> None:
        """All hidden states go on to the next rank."""
        step.inputs.only_logits = False

    def start(self, step: Step, hidden: Tensor, masks: GrammarMasks | None, result: StepResult) -> Started:
        self._steps[step.plan.step] = step.slots, self.rows.turn[step.slots]
        return lambda: None, None

    def told(self, number: int, tokens: Sequence[Sequence[int]]) -> None:
        """What was drawn for each row of a step; rows may have gone since."""
        if number not in self._steps:  # it had no rows, or all were forgotten
            return
        slots, turns = self._steps.pop(number)
        live = self.rows.turn[slots] == turns
        for slot, drawn, here in zip(slots.tolist(), tokens, live.tolist(), strict=True):
            if here:
                self.rows.extend(slot, drawn)

"""How many tokens of each row are guessed, and by whom."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from lmkit.api import PluginError

from lmkit_worker.branches import check

if TYPE_CHECKING:
    from lmkit.api import StepResult
    from torch import Tensor

    from lmkit_worker.drafting import Source
    from lmkit_worker.inputs import Step
    from lmkit_worker.rows import RowTable

TOKENS = 12  # of a step, guesses included, up to which a token more takes a processor hardly longer
FIRST = 4  # guesses for a row of which nothing is known yet
LONGEST_PAUSE = 64  # steps


class Proposals:
    """Asks the proposer for as many tokens of a row as lately came true.

    When all guesses of a row were right, it gets twice as many the next time; otherwise one more than were right. A row
    whose guesses were all wrong gets none for a step, then for 3, 7, up to LONGEST_PAUSE. Rows share TOKENS: in a
    step with many rows no token is guessed. Where guesses branch, a row gets its share of them each time.
    """

    def __init__(self, source: Source, rows: RowTable, most: int, vocab_size: int) -> None:
        """`most`: guesses per row and step."""
        self.source, self._most, self._vocab_size = source, most, vocab_size
        self._first = most if source.branches else FIRST
        self._reach = np.full(rows.max_rows, self._first, np.int64)
        self._pause = np.zeros(rows.max_rows, np.int64)  # steps until the row is asked again
        self._missed = np.zeros(rows.max_rows, np.int64)  # times in a row that all guesses were wrong

    def add(self, slot: int) -> None:
        self._reach[slot], self._pause[slot], self._missed[slot] = self._first, 0, 0

    def fill(self, step: Step, hidden: Tensor, result: StepResult) -> None:
        """Puts the guesses for the next step into `result.drafts`, after the tokens of this one."""
        rows = [row for row in step.sample_rows.tolist() if result.tokens[row]]
        slots = [int(step.slots[row]) for row in rows]
        for row, slot in zip(rows, slots, strict=True):
            self._learn(slot, len(step.plan.rows[row].drafts), len(result.tokens[row]) - 1)
        share = TOKENS // len(rows) - 1 if rows else 0
        asked = [i for i, slot in enumerate(slots) if not self._pause[slot]] if share > 0 else []
        self._pause[slots] = np.maximum(self._pause[slots] - 1, 0)
        most = [min(share, self._most, int(self._reach[slots[i]])) for i in asked]
        guesses = self.source.guess(step, hidden, result, [rows[i] for i in asked], most)
        if not asked:
            return
        result.drafts = [[] for _ in step.plan.rows]
        for i, limit, guess in zip(asked, most, guesses, strict=True):
            result.drafts[rows[i]] = drafts = guess[:limit]
            if result.parents and (why := check(guess, result.parents[rows[i]])):
                raise PluginError(f"{self.source.name} guessed no tree: {why}")
            if not all(0 <= token < self._vocab_size for token in drafts):
                raise PluginError(f"{self.source.name} guessed {drafts}: one is no token")

    def _learn(self, slot: int, num_drafts: int, num_right: int) -> None:
        if not num_drafts:
            return
        self._missed[slot] = 0 if num_right else self._missed[slot] + 1
        self._pause[slot] = min(2 ** int(self._missed[slot]) - 1, LONGEST_PAUSE)
        if self.source.branches:  # the draft's probabilities say where to go on, and how far
            return
        right = num_right == num_drafts
        self._reach[slot] = min(2 * num_drafts if right else num_right + 1, self._most)

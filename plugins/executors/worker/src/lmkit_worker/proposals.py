"""Who guesses tokens, how many of each row, and what guessing costs."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from lmkit.api import PluginError

from lmkit_worker.along import BEHIND
from lmkit_worker.branches import check
from lmkit_worker.lengths import Lengths

if TYPE_CHECKING:
    from lmkit.api import StepResult
    from torch import Tensor

    from lmkit_worker.drafting import Source
    from lmkit_worker.inputs import Step
    from lmkit_worker.rows import RowTable

NO_LIMIT = 1 << 30  # tokens
LONGEST_PAUSE = 16  # steps in which nobody is asked, after nobody was or had a guess: 1, 2, 4, up to so many
HOPELESS_PAUSE = 128  # the same while hardly a guess comes true
TRIED = 1  # guesses of a row after such a pause


def clock() -> float:
    """Seconds. A test that counts steps stops it: nothing is measured then."""
    return time.perf_counter()


class Proposals:
    """Asks the proposer for as many tokens of each row as `Lengths` says, and measures steps for it.

    A step takes the time between two calls that follow one another with the same rows: the guessing after the step
    before, what the engine does, and the step itself. A step with a prompt in it, or new rows, says nothing.
    """

    def __init__(
        self, source: Source, rows: RowTable, most: int, vocab_size: int, now: Callable[[], float] | None = None
    ) -> None:
        """`most`: guesses per row and step. `now`: seconds on a clock."""
        self.source, self._rows, self._vocab_size = source, rows, vocab_size
        self.lengths = Lengths(rows.max_rows, most)
        self._now = now or (lambda: clock())
        self._before: tuple[list[int], float] = [], 0.0  # slots of the step before, and when it was over
        self._pause = self._paused = 0  # steps of this pause, and how many of them are over

    def add(self, slot: int) -> None:
        self.lengths.add(slot)
        self._before = [], 0.0
        if not self.lengths.hopeless:
            self._pause = 0

    def rests(self, step: Step) -> bool:
        """Whether the source need not know of a step: it catches up with the last `BEHIND` before it is asked."""
        return self._pause - self._paused > BEHIND and step.num_drafts is None

    def fill(self, step: Step, hidden: Tensor, result: StepResult) -> None:
        """Puts the guesses for the next step into `result.drafts`, after the tokens of this one."""
        if self._paused < self._pause and step.num_drafts is None:
            if not self._paused:
                self._measure(step, step.slots[step.sample_rows].tolist(), 0)
            rests = self.rests(step)
            self._paused += 1
            self._before = [], 0.0
            if not rests:
                self.source.guess(step, hidden, result, [], [])
            return
        rows = [row for row in step.sample_rows.tolist() if result.tokens[row]]
        slots = [int(step.slots[row]) for row in rows]
        work = [step.plan.rows[row] for row in rows]
        num_drafts = [len(w.drafts) for w in work]
        self._measure(step, slots, sum(num_drafts))
        lucky = False
        for row, slot, num in zip(rows, slots, num_drafts, strict=True):
            num_right = len(result.tokens[row]) - 1
            lucky = lucky or num_right > 0
            self.lengths.learn(slot, num, num_right)
        rested, self._paused = self._paused, 0
        if rested:
            self.lengths.pass_by(slots, rested)
        hopeless = self.source.hopeless = self.lengths.hopeless and not lucky
        chosen = self._choose(slots, TRIED if hopeless else NO_LIMIT) if rested or not hopeless else []
        asked = [i for i, num in enumerate(chosen) if num]
        most = [chosen[i] for i in asked]
        guesses = self.source.guess(step, hidden, result, [rows[i] for i in asked], most)
        self._rest(hopeless, any(guesses))
        if not asked:
            return
        result.drafts = [[] for _ in step.plan.rows]
        for i, limit, guess in zip(asked, most, guesses, strict=True):
            result.drafts[rows[i]] = drafts = guess[:limit]
            if result.parents and (why := check(guess, result.parents[rows[i]])):
                raise PluginError(f"{self.source.name}: propose gave no tree: {why}")
            if not all(0 <= token < self._vocab_size for token in drafts):
                raise PluginError(f"{self.source.name}: propose gave {drafts}: one is no token")

    def _rest(self, hopeless: bool, found: bool) -> None:
        """How many steps nobody is asked in from now on."""
        if found and not hopeless:
            self._pause = 0
            return
        self._pause = max(1, min(2 * self._pause, HOPELESS_PAUSE if hopeless else LONGEST_PAUSE))
        if self._pause > BEHIND:
            self.source.rest()

    def _choose(self, slots: list[int], most: int) -> list[int]:
        """How many guesses each row is asked for."""
        return self.lengths.choose(slots, [min(num, most) for num in self._wanted(slots)]) if slots else []

    def _wanted(self, slots: list[int]) -> list[int]:
        """How many guesses may be of use to each row: its last token is not guessed, but drawn after them."""
        rows, wanted = self._rows, []
        for slot in slots:
            params = rows.params[slot]
            limit = params.max_tokens if params is not None else None
            left = NO_LIMIT if limit is None else limit - int(rows.num_tokens[slot] - rows.num_prompt[slot]) - 1
            wanted.append(max(0, left))
        return wanted

    def _measure(self, step: Step, slots: list[int], num_drafts: int) -> None:
        now = self._now()
        before, since = self._before
        self._before = slots, now
        alone = len(step.layout.positions) == len(slots) + num_drafts == len(step.plan.rows) + num_drafts
        if slots and slots == before and alone and now > since:
            self.lengths.costs.learn(len(slots), num_drafts, now - since)

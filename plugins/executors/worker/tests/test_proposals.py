"""When a proposer is asked, and when it is not even told of steps: on a clock that stands, with rows of one token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from lmkit.api import StepResult
from lmkit_worker.along import BEHIND
from lmkit_worker.proposals import HOPELESS_PAUSE, LONGEST_PAUSE, Proposals

VOCAB = 100
Says = Callable[[int], tuple[int, bool]]  # number of a step -> how many guesses at most, and whether they are right


class Told:
    """A source that says what the test wants, and writes down what it was told."""

    name, reads_hidden, branches, hopeless = "told", True, False, False

    def __init__(self, most: Callable[[], int]) -> None:
        self.most = most
        self.guessed: list[int] = []  # guesses of each call
        self.rests = 0

    def guess(
        self, step: Any, hidden: Any, result: StepResult, asked: Sequence[int], most: Sequence[int]
    ) -> list[list[int]]:
        found = [[1] * min(limit, self.most()) for limit in most]
        self.guessed.append(sum(map(len, found)))
        return found

    def rest(self) -> None:
        self.rests += 1


class Steps:
    """Runs steps of `num_rows` rows, whose guesses are right or wrong as `says` has it."""

    def __init__(self, says: Says, num_rows: int = 1, length: int = 1 << 20) -> None:
        """A row is followed by another after `length` steps."""
        self.now, self.seconds = 0, 0.0
        self.says, self.num_rows, self.length = says, num_rows, length
        self.source = Told(lambda: says(self.now)[0])
        params = SimpleNamespace(max_tokens=None)
        rows: Any = SimpleNamespace(max_rows=num_rows, params=[params] * num_rows)
        self.proposals = Proposals(self.source, rows, 8, VOCAB, lambda: self.seconds)
        self.drafts: list[list[int]] = [[] for _ in range(num_rows)]
        self.asked: list[int] = []  # steps with guesses for the next
        self.told = 0  # steps in which the source was told of

    def run(self, num: int) -> None:
        for _ in range(num):
            if self.now % self.length == 0:
                for slot in range(self.num_rows):
                    self.proposals.add(slot)
                    self.drafts[slot] = []
            self.step()

    def step(self) -> None:
        works = [SimpleNamespace(drafts=drafts) for drafts in self.drafts]
        counts = np.array([len(drafts) for drafts in self.drafts])
        slots = np.arange(self.num_rows)
        step: Any = SimpleNamespace(
            plan=SimpleNamespace(rows=works), slots=slots, sample_rows=slots,
            num_drafts=counts if counts.any() else None,
            layout=SimpleNamespace(positions=np.zeros(self.num_rows + counts.sum())),
        )  # fmt: skip
        right = self.says(self.now)[1]
        result = StepResult(self.now, [[2] * (1 + right * len(drafts)) for drafts in self.drafts])
        rests, before = self.proposals.rests(step), len(self.source.guessed)
        hidden: Any = None
        self.proposals.fill(step, hidden, result)
        told = len(self.source.guessed) > before
        assert told != rests, "a step that it is not told of needs no hidden states, and any other may need them"
        self.told += told
        self.drafts = result.drafts or [[] for _ in self.drafts]
        if any(self.drafts):
            self.asked.append(self.now)
        self.now += 1
        self.seconds += 1 + 0.2 * counts.any()  # guesses cost little: it is worth while to try them


@pytest.mark.parametrize("length", [1 << 20, 18])
@pytest.mark.parametrize("num_rows", [1, 8])
def test_what_is_always_wrong_is_tried_once_in_a_long_pause_and_not_told_of_most_steps(
    num_rows: int, length: int
) -> None:
    steps = Steps(lambda now: (8, False), num_rows, length)
    steps.run(1000)
    steps.asked, steps.told, steps.source.guessed, steps.source.rests = [], 0, [], 0
    steps.run(40 * HOPELESS_PAUSE)
    assert 20 <= len(steps.asked) <= 40
    assert max(steps.source.guessed) == num_rows, "one guess of each row"
    assert steps.told <= 40 * (BEHIND + 2)
    assert steps.source.rests >= 30, "what it kept is forgotten"


def test_what_was_always_wrong_is_asked_again_soon_after_it_is_right() -> None:
    steps = Steps(lambda now: (8, now >= 2000))
    steps.run(2000)
    assert steps.proposals.lengths.hopeless
    steps.run(2 * HOPELESS_PAUSE)
    steps.source.guessed = []
    steps.run(50)
    assert sum(steps.source.guessed) > 6 * 50


def test_who_has_no_guess_is_asked_seldom_but_not_too_seldom() -> None:
    steps = Steps(lambda now: (8 * (now >= 1000), True))
    steps.run(1000)
    assert not steps.asked
    assert not steps.source.rests, "what has no guess now may have one soon"
    steps.run(LONGEST_PAUSE + 40)
    assert steps.asked[0] <= 1000 + LONGEST_PAUSE
    assert len(steps.asked) >= 39

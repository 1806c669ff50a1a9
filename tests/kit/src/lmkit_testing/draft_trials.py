"""Random trials of drafts: the scheduler, the worker's verification and proposers of every sort against the hash-model.

    python -m lmkit_testing.draft_trials 100000     trials with seeds 0 .. 99999 on all cores, then every fault
    python -m lmkit_testing.draft_trials --seed 17  one trial again

As `lmkit_testing.trials`, but every engine guesses. Its proposer is drawn: one that is always right, one that never is,
one that mixes, or one that says what does harm where it is believed. Faults of verification, and those mutants of the
scheduler that concern drafts, must be found.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

from lmkit_worker.sampling import accept

from lmkit_testing.mutants import applied
from lmkit_testing.trials import VOCAB, Story, Summary, Trial, command, run_trials

Accept = Callable[[Sequence[int], Sequence[int]], list[int]]
MUTANTS = ("rejected_drafts_stay", "drafts_published", "min_tokens_ignored", "capacity_overstated")


class DraftTrial(Trial):
    """An engine that guesses, and a story, drawn from a seed."""

    depths = (1,)
    drafts = (1, 2, 3, 8, 16)
    share_recurrent = 0.0

    def __init__(self, seed: int, accept: Accept = accept) -> None:
        super().__init__(seed)
        self.executor.accept = accept
        self.sort = self.rng.choice(["right", "wrong", "mixed", "mixed", "harmful"])

    def propose(self, tokens: list[int], k: int) -> list[int]:
        rng = self.rng
        if self.sort == "mixed":
            return super().propose(tokens, k)
        if self.sort == "harmful":
            ends = [*self.limits.eos_token_ids, tokens[-1], 0, VOCAB - 1]
            guess = [rng.choice(ends) for _ in range(rng.choice([0, 1, k, 10 * k]))]  # more than was asked for, too
            return (self._right(tokens, rng.randint(0, k)) + guess) if rng.random() < 0.5 else guess
        right = self._right(tokens, k)
        return right if self.sort == "right" else [(token + 1) % VOCAB for token in right] or [tokens[-1]] * k

    def _right(self, tokens: list[int], k: int) -> list[int]:
        """What follows; of several requests with this text so far, what follows in the first."""
        story: Story | None = next((s for s in self.stories.values() if self._is_of(tokens, s)), None)
        return self.oracle(story)[len(tokens) :][:k] if story else []


def one_too_many(drawn: Sequence[int], drafts: Sequence[int]) -> list[int]:
    """The token after the first wrong draft counts as well."""
    return list(drawn[: len(accept(drawn, drafts)) + 1])


def bonus_from_the_next_place(drawn: Sequence[int], drafts: Sequence[int]) -> list[int]:
    """The last token is the one drawn a place later."""
    right = accept(drawn, drafts)
    return [*right[:-1], drawn[min(len(right), len(drawn) - 1)]]


def bonus_from_the_place_before(drawn: Sequence[int], drafts: Sequence[int]) -> list[int]:
    """The last token is the one drawn a place earlier."""
    right = accept(drawn, drafts)
    return [*right[:-1], drawn[max(0, len(right) - 2)]]


def drafts_believed(drawn: Sequence[int], drafts: Sequence[int]) -> list[int]:
    """Drafts count, whatever was drawn."""
    return [*drafts, drawn[-1]]


def first_draft_not_compared(drawn: Sequence[int], drafts: Sequence[int]) -> list[int]:
    """The first draft counts as right."""
    return [drafts[0], *accept(drawn[1:], drafts[1:])] if drafts else list(drawn)


def draft_instead_of_bonus(drawn: Sequence[int], drafts: Sequence[int]) -> list[int]:
    """After the right drafts stands the wrong one, not the token drawn in its place."""
    right = accept(drawn, drafts)
    return [*right[:-1], drafts[len(right) - 1]] if len(right) <= len(drafts) else right


FAULTS: dict[str, Accept] = {
    f.__name__: f
    for f in (
        one_too_many, bonus_from_the_next_place, bonus_from_the_place_before, drafts_believed, first_draft_not_compared,
        draft_instead_of_bonus,
    )
}  # fmt: skip


def hunt(name: str, seeds: Iterable[int]) -> tuple[int, str] | None:
    """The first trial that finds the fault or mutant, and how; None when none does."""
    for seed in seeds:
        try:
            if name in FAULTS:
                DraftTrial(seed, FAULTS[name]).run()
            else:
                with applied(name):
                    DraftTrial(seed).run()
        except Exception as e:
            return seed, f"{type(e).__name__}: {e}"[:90]
    return None


def trials(seeds: range) -> Summary:
    """Raises what a fault leads to; the seed is in its notes."""
    logging.getLogger("lmkit.engine").setLevel(logging.CRITICAL)  # steps fail here on purpose
    return run_trials(seeds, lambda seed: DraftTrial(seed).run())


def side_by_side(seeds: range, processes: int) -> Summary:
    """As `trials`, in several processes."""
    parts = [seeds[i : i + 500] for i in range(0, len(seeds), 500)]
    whole = Summary()
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        for part in pool.map(trials, parts):
            whole.trials += part.trials
            whole.counts += part.counts
            whole.seconds += part.seconds
    return whole


def main(argv: list[str] | None = None) -> int:
    def lines(seeds: range) -> Iterable[str]:
        return side_by_side(seeds, os.cpu_count() or 1).lines()

    def one(seed: int) -> None:
        DraftTrial(seed).run()

    return command("draft_trials", __doc__, argv, one=one, lines=lines, faults=(*FAULTS, *MUTANTS), hunt=hunt)


if __name__ == "__main__":
    sys.exit(main())

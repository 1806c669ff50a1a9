"""Random trials of drafts: the scheduler, the worker's verification and proposers of every sort against the hash-model.

    python -m lmkit_testing.draft_trials 100000     trials with seeds 0 .. 99999 on all cores, then every fault
    python -m lmkit_testing.draft_trials --seed 17  one trial again

As `lmkit_testing.trials`, but every engine guesses. Its proposer is drawn: one that is always right, one that never is,
one that mixes, one that says what does harm where it is believed, or one whose guesses branch. Faults of verification,
of trees, and those mutants of the scheduler that concern drafts, must be found.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

from lmkit.api import RowWork, StepPlan, StepResult
from lmkit_worker import branches
from lmkit_worker.sampling import accept
from msgspec.structs import replace

from lmkit_testing.hash_model import _high, _low, _Row
from lmkit_testing.mutants import applied
from lmkit_testing.trials import VOCAB, Story, Summary, Trial, WatchedExecutor, command, run_trials

Accept = Callable[[Sequence[int], Sequence[int]], list[int]]
Follow = Callable[[Sequence[int], Sequence[int], Sequence[int]], list[int]]
Tree = tuple[list[int], list[int]]  # drafts, and the parents of each
MUTANTS = ("rejected_drafts_stay", "drafts_published", "min_tokens_ignored", "capacity_overstated")


class TreeExecutor(WatchedExecutor):
    """Computes and verifies drafts that branch, too: each reads what is known and its own path, and what is accepted
    moves to its position."""

    trees: Callable[[list[int], int], Tree] | None = None  # who guesses instead of `propose`
    follow: Follow = staticmethod(branches.follow)
    moves = True

    def _write(self, plan: StepPlan) -> None:
        known = [without_drafts(work) if work.parents else work for work in plan.rows]
        super()._write(replace(plan, rows=known))
        for work in plan.rows:
            if work.parents:
                self._write_tree(self.rows[work.id], work)

    def _write_tree(self, row: _Row, work: RowWork) -> None:
        first = work.start + work.num_tokens - len(work.drafts)
        positions = [first - 1]
        assert all(window is None for window in self.model.windows), "trees and windows exclude each other"
        for i, (draft, parent) in enumerate(zip(work.drafts, work.parents, strict=True)):
            positions.append(positions[parent + 1] + 1)
            for g, (low, high) in enumerate(zip(self.low, self.high, strict=True)):
                slot, before = (
                    self._slot(row, g, first + i),
                    self._slot(row, g, first + parent if parent >= 0 else first - 1),
                )
                low[slot] = _low(draft, positions[-1], row.tint)
                high[slot] = _high(low[before], low[slot])

    def _draw(self, row: _Row, work: RowWork, allowed: Sequence[int]) -> list[int]:
        if not work.parents:
            return super()._draw(row, work, allowed)
        first, known = work.start + work.num_tokens - len(work.drafts), len(row.tokens) - row.num_prompt_tokens
        ways: list[list[int]] = [[]]  # the drafts before each token drawn
        for i, parent in enumerate(work.parents):
            ways.append([*ways[parent + 1], i])
        drawn: list[int] = []
        for j, way in enumerate(ways):
            seen = self._seen(row, first)
            for g, entries in enumerate(seen):
                entries += [self.high[g][self._slot(row, g, first + i)] for i in way]
            token = self.model.draw(seen, row.params, known + len(way))
            while allowed and not allowed[j] >> token & 1:
                token = (token + 1) % self.vocab_size
            drawn.append(token)
        kept = self.follow(drawn, work.drafts, work.parents)
        for depth, i in enumerate(kept if self.moves else []):
            for g, sides in enumerate(zip(self.low, self.high, strict=True)):
                for side in sides:
                    side[self._slot(row, g, first + depth)] = side[self._slot(row, g, first + i)]
        return [drawn[0], *(drawn[1 + i] for i in kept)]

    def _read(self, plan: StepPlan, allowed: Mapping[int, list[int]]) -> StepResult:
        result = super()._read(plan, allowed)
        if self.trees is not None:
            found = [
                self.trees(self.rows[work.id].tokens, self.num_drafts) if work.sample else ([], [])
                for work in plan.rows
            ]
            result.drafts, result.parents = [tokens for tokens, _ in found], [parents for _, parents in found]
        return result


def without_drafts(work: RowWork) -> RowWork:
    """What is known of the same work."""
    return replace(work, num_tokens=work.num_tokens - len(work.drafts), drafts=[], parents=[])


class DraftTrial(Trial):
    """An engine that guesses, and a story, drawn from a seed."""

    depths = (1,)
    drafts = (1, 2, 3, 8, 16)
    share_recurrent = 0.0
    executor_type = TreeExecutor
    executor: TreeExecutor

    def __init__(self, seed: int, accept: Accept = accept, **tree: Any) -> None:
        """`tree`: attributes of the executor that a fault changes."""
        super().__init__(seed)
        self.executor.accept = accept
        for name, value in tree.items():
            setattr(self.executor, name, value)
        self.sort = self.rng.choice(["right", "wrong", "mixed", "mixed", "harmful"])
        if self.windows == (None,) and self.rng.random() < 0.5:
            self.sort, self.executor.propose, self.executor.trees = "tree", None, self.tree

    def tree(self, tokens: list[int], k: int) -> Tree:
        """A tree of random shape. Tokens are, with the chance `accept`, what follows at their depth, whatever their
        parents are: the child of a wrong one is often the very token that is drawn there."""
        rng, right = self.rng, self._right(tokens, k)
        drafts: list[int] = []
        parents: list[int] = []
        depths: list[int] = []
        wide = rng.choice([0.0, 0.5, 1.0])
        for i in range(rng.randint(0, k)):
            parent = rng.randint(-1, i - 1) if rng.random() < wide else i - 1
            depth = depths[parent] + 1 if parent >= 0 else 0
            known = depth < len(right) and rng.random() < max(0.3, self.accept)
            drafts.append(right[depth] if known else rng.randrange(VOCAB))
            parents.append(parent)
            depths.append(depth)
        return drafts, parents

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


def sibling_counts(drawn: Sequence[int], drafts: Sequence[int], parents: Sequence[int]) -> list[int]:
    """A child of the accepted draft's sibling counts as its own."""
    path: list[int] = []
    depths = branches.seen(parents)[0].tolist()
    for i, draft in enumerate(drafts):
        if depths[i] == len(path) + 1 and draft == drawn[(path[-1] if path else -1) + 1]:
            path.append(i)
    return path


def first_child_counts(drawn: Sequence[int], drafts: Sequence[int], parents: Sequence[int]) -> list[int]:
    """The first draft counts as right."""
    path = branches.follow(drawn, drafts, parents)
    return path or ([0] if drafts else [])


TREE_FAULTS: dict[str, dict[str, Any]] = {
    "sibling_counts": {"follow": sibling_counts},
    "first_child_counts": {"follow": first_child_counts},
    "keys_not_moved": {"moves": False},
}


def hunt(name: str, seeds: Iterable[int]) -> tuple[int, str] | None:
    """The first trial that finds the fault or mutant, and how; None when none does."""
    for seed in seeds:
        try:
            if name in FAULTS:
                DraftTrial(seed, FAULTS[name]).run()
            elif name in TREE_FAULTS:
                DraftTrial(seed, **TREE_FAULTS[name]).run()
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

    return command(
        "draft_trials", __doc__, argv, one=one, lines=lines, faults=(*FAULTS, *TREE_FAULTS, *MUTANTS), hunt=hunt
    )


if __name__ == "__main__":
    sys.exit(main())

"""How many tokens are guessed: as many as give most tokens a second, as far as is known by then."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

SIZES = np.array([0, 1, 2, 4, 8, 16, 32, 64])  # guesses of a step that are told apart: the next larger stands for all
TOKENS = 12  # of a step, up to which one more is taken to cost little while nothing has been measured
GUESS = 0.04  # what a guess is taken to cost then, of a step without
CHANCE, WEIGHT = 0.6, 0.5  # a guess comes true, while nothing is known of the row, and how many guesses that weighs
REMEMBERED, FADING = 6.0, 0.985  # guesses that a row is known by at most; and what is left after a step without any
NEW = 0.2  # weight of a measured step in the mean
OUTLIER = 2.0  # times the mean: more counts as so much, since a machine may do something else for a while
AGE = 512  # steps after which what was measured is taken to be half: what looks dear is tried again, and rarely


class Costs:
    """Seconds of steps by number of rows and of guesses: means in which older steps count less and less.

    The first step of a kind does not count, since it may record a graph or compile a kernel; of the next two the
    shorter does.
    """

    def __init__(self) -> None:
        self._kinds: dict[int, np.ndarray] = {}  # rows -> [3, SIZES]: means, steps since, steps measured

    def learn(self, num_rows: int, num_guesses: int, seconds: float) -> None:
        """A step of so many rows with so many guesses in all took so long, the guessing included."""
        i = int(np.searchsorted(SIZES, min(num_guesses, int(SIZES[-1]))))
        means, ages, counts = self._kinds.setdefault(_bucket(num_rows), np.zeros((3, len(SIZES))))
        ages += 1
        ages[i], mean = 0, means[i]
        counts[i] += 1
        if counts[i] <= 2 or (counts[i] == 3 and seconds < mean) or seconds < mean / OUTLIER:
            means[i] = seconds
        elif counts[i] > 3:
            means[i] += NEW * (min(seconds, OUTLIER * mean) - mean)

    def of(self, num_rows: int) -> np.ndarray:
        """What steps with SIZES guesses are taken to cost, [SIZES]: measured, or from the nearest that
        is, as if reading weights took all the time for more guesses, and arithmetic for fewer."""
        guessed = (1 + GUESS * SIZES) * np.maximum(1.0, (num_rows + SIZES) / TOKENS)
        kind = self._kinds.get(_bucket(num_rows))
        known = np.flatnonzero(kind[2] > 2) if kind is not None else np.empty(0, np.int64)
        if kind is None or not len(known):
            return guessed
        nearest = known[np.abs(known - np.arange(len(SIZES))[:, None]).argmin(1)]
        more, fewer = guessed / guessed[nearest], (num_rows + SIZES) / (num_rows + SIZES[nearest])
        return kind[0][nearest] * np.minimum(more, fewer) / (1 + kind[1] / AGE)


class Lengths:
    """Chooses how many tokens are guessed for each row of a step.

    A guess comes true with a chance of its row, if those before it did: the share of those that did lately. So the
    expected tokens of a step follow from how many guesses there are, the likeliest first, and the best number is that
    with most of them a second. What a row is known for fades with steps that guess nothing: it is tried again.
    """

    def __init__(self, max_rows: int, most: int) -> None:
        """`most`: guesses per row and step."""
        self.costs = Costs()
        self._most, self._powers = most, np.arange(1, most + 1)
        self._right = np.zeros(max_rows)
        self._tried = np.zeros(max_rows)

    def add(self, slot: int) -> None:
        """Nothing is known of the row in `slot`."""
        self._right[slot] = self._tried[slot] = 0.0

    def learn(self, slot: int, num_guesses: int, num_right: int) -> None:
        """The first `num_right` of the guesses for a row in a step were right."""
        tried = self._tried[slot] + num_right + (num_right < num_guesses)
        kept = min(1.0, REMEMBERED / max(tried, 1.0)) if num_guesses else FADING
        self._right[slot] = (self._right[slot] + num_right) * kept
        self._tried[slot] = tried * kept

    def choose(self, slots: Sequence[int]) -> list[int]:
        """How many tokens to guess for each row of the next step."""
        right, tried = self._right[slots], self._tried[slots]
        chances = ((right + CHANCE * WEIGHT) / (tried + WEIGHT))[:, None] ** self._powers
        flat = chances.ravel()
        order = np.argsort(-flat, kind="stable")[: SIZES[-1]]
        expected = len(slots) + np.concatenate(([0.0], np.cumsum(flat[order])))
        sizes = SIZES[len(order) >= SIZES]
        best = sizes[(expected[sizes] / self.costs.of(len(slots))[: len(sizes)]).argmax()]
        return np.bincount(order[:best] // self._most, minlength=len(slots)).tolist()


def _bucket(num_rows: int) -> int:
    """Numbers of rows that are taken to be alike: up to eight each by itself."""
    return num_rows if num_rows <= 8 else 1 << (num_rows - 1).bit_length()

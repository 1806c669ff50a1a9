"""How many tokens are guessed: as many as give most tokens a second, as far as is known by then."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from functools import lru_cache
from heapq import heappop, heapreplace

SIZES = (0, 1, 2, 4, 8, 16, 32, 64)  # guesses of a step that are told apart: the next larger stands for all
TOKENS = 12  # of a step, up to which one more is taken to cost little while nothing has been measured
GUESS = 0.04  # what a guess is taken to cost then, of a step without
CHANCE, WEIGHT = 0.6, 0.5  # a guess comes true, while nothing is known of any row, and how many guesses that weighs
REMEMBERED, FADING = 6.0, 0.985  # guesses that a row is known by at most; and what is left after a step without any
OF_ALL, FADING_OF_ALL = 12.0, 0.995  # the same of all rows together
LEAST = 0.2  # a guess comes true at least with this chance, while nothing is known of the row
HOPELESS = 0.1  # share of the last guesses of all rows: what comes true more seldom is not worth being ready for more
NEW = 0.2  # weight of a measured step in the mean
OUTLIER = 2.0  # times the mean: more counts as so much, since a machine may do something else for a while
AGE = 512  # steps after which what was measured is taken to be half: what looks dear is tried again, and rarely


class Costs:
    """Seconds of steps by number of rows and of guesses: means in which older steps count less and less.

    The first step of a kind does not count, since it may record a graph or compile a kernel; of the next two the
    shorter does.
    """

    def __init__(self) -> None:
        self._kinds: dict[int, _Kind] = {}  # by number of rows

    def learn(self, num_rows: int, num_guesses: int, seconds: float) -> None:
        """A step of so many rows with so many guesses in all took so long, the guessing included."""
        i = bisect_left(SIZES, min(num_guesses, SIZES[-1]))
        bucket = _bucket(num_rows)
        kind = self._kinds.get(bucket)
        if kind is None:
            kind = self._kinds[bucket] = _Kind()
        kind.now += 1
        kind.when[i] = kind.now
        kind.counts[i] += 1
        count, mean = kind.counts[i], kind.means[i]
        if count <= 2 or (count == 3 and seconds < mean) or seconds < mean / OUTLIER:
            kind.means[i] = seconds
        if count == 3:
            kind.known = tuple(place for place, num in enumerate(kind.counts) if num >= 3)
        elif count > 3 and seconds >= mean / OUTLIER:
            kind.means[i] += NEW * (min(seconds, OUTLIER * mean) - mean)

    def pass_by(self, num_rows: int, num: int) -> None:
        """So many steps without a guess were not measured: what those cost is as well known as it was."""
        kind = self._kinds.get(_bucket(num_rows))
        if kind is not None:
            kind.now += num
            kind.when[0] += num

    def of(self, num_rows: int) -> list[float]:
        """What steps with SIZES guesses are taken to cost: measured, or from the nearest that is, as if reading weights
        took all the time for more guesses, and arithmetic for fewer."""
        kind = self._kinds.get(_bucket(num_rows))
        if kind is None or not kind.known:
            return _guessed(num_rows, TOKENS)
        nearest = _from(num_rows, TOKENS, kind.known)
        ages = [1 + (kind.now - step) / AGE for step in kind.when]
        return [kind.means[at] * factor / age for (at, factor), age in zip(nearest, ages, strict=True)]


class _Kind:
    """What is known of steps of one number of rows, by the place of their number of guesses in SIZES."""

    def __init__(self) -> None:
        self.now = 0  # steps so far
        self.means = [0.0] * len(SIZES)
        self.when = [0] * len(SIZES)  # the step that was measured last; what never was grows old as well
        self.counts = [0] * len(SIZES)
        self.known: tuple[int, ...] = ()  # places that were measured often enough


@lru_cache(512)
def _guessed(num_rows: int, tokens: int) -> list[float]:
    """What steps with SIZES guesses are taken to cost while nothing is measured, of a step without. `tokens`: as
    TOKENS."""
    return [(1 + GUESS * size) * max(1.0, (num_rows + size) / tokens) for size in SIZES]


@lru_cache(512)
def _from(num_rows: int, tokens: int, known: tuple[int, ...]) -> list[tuple[int, float]]:
    """The nearest place that is known to each of SIZES, and how many times as much a step is taken to cost."""
    guessed, found = _guessed(num_rows, tokens), []
    for i, size in enumerate(SIZES):
        at = min(known, key=lambda k: abs(k - i))
        found.append((at, min(guessed[i] / guessed[at], (num_rows + size) / (num_rows + SIZES[at]))))
    return found


class Lengths:
    """Chooses how many tokens are guessed for each row of a step.

    A guess comes true with a chance of its row, if those before it did: the share of those that did lately. So the
    expected tokens of a step follow from how many guesses there are, the likeliest first, and the best number is that
    with most of them a second. A row of which nothing is known is taken to be like those before it. What rows are known
    for fades with steps that guess nothing: they are tried again.
    """

    def __init__(self, max_rows: int, most: int) -> None:
        """`most`: guesses per row and step."""
        self.costs = Costs()
        self._most = most
        self._right = [0.0] * max_rows
        self._tried = [0.0] * max_rows
        self._right_of_all = self._tried_of_all = 0.0
        self._right_lately = self._tried_lately = 0.0  # the same, but time changes nothing

    def add(self, slot: int) -> None:
        """Nothing is known of the row in `slot`."""
        self._right[slot] = self._tried[slot] = 0.0

    def learn(self, slot: int, num_guesses: int, num_right: int) -> None:
        """The first `num_right` of the guesses for a row in a step were right."""
        tried = self._tried[slot] + num_right + (num_right < num_guesses)
        kept = min(1.0, REMEMBERED / max(tried, 1.0)) if num_guesses else FADING
        self._right[slot] = (self._right[slot] + num_right) * kept
        self._tried[slot] = tried * kept
        if num_guesses:
            tried = self._tried_of_all + num_right + (num_right < num_guesses)
            kept = min(1.0, OF_ALL / tried)
            self._right_of_all = (self._right_of_all + num_right) * kept
            self._tried_of_all = tried * kept
            tried = self._tried_lately + num_right + (num_right < num_guesses)
            kept = min(1.0, OF_ALL / tried)
            self._right_lately = (self._right_lately + num_right) * kept
            self._tried_lately = tried * kept

    def pass_by(self, slots: Sequence[int], num: int) -> None:
        """So many steps of the rows had no guesses, and nobody asked for any."""
        self.costs.pass_by(len(slots), num)
        kept, kept_of_all = FADING**num, FADING_OF_ALL**num
        for slot in slots:
            self._right[slot] *= kept
            self._tried[slot] *= kept
        self._right_of_all *= kept_of_all
        self._tried_of_all *= kept_of_all

    @property
    def hopeless(self) -> bool:
        """Whether hardly one of the last guesses came true, of any row, however long ago they were."""
        return self._tried_lately > OF_ALL / 3 and self._right_lately < HOPELESS * self._tried_lately

    def choose(self, slots: Sequence[int], wanted: Sequence[int] | None = None) -> list[int]:
        """How many tokens to guess for each row of the next step, `wanted` at most."""
        most = [self._most] * len(slots) if wanted is None else [min(self._most, num) for num in wanted]
        self._right_of_all *= FADING_OF_ALL
        self._tried_of_all *= FADING_OF_ALL
        usual = WEIGHT * max(LEAST, (self._right_of_all + CHANCE * WEIGHT) / (self._tried_of_all + WEIGHT))
        chances = [(self._right[slot] + usual) / (self._tried[slot] + WEIGHT) for slot in slots]
        # Of each row the next guess comes true:
        nexts = [(-chance, row) for row, chance in enumerate(chances) if most[row]]
        nexts.sort()
        costs = self.costs.of(len(slots))
        expected = float(len(slots))
        chosen, best, rate = [0] * len(slots), 0, expected / costs[0]
        order: list[int] = []
        for i, size in enumerate(SIZES[1:], 1):
            while nexts and len(order) < size:
                chance, row = nexts[0]
                expected -= chance
                order.append(row)
                chosen[row] += 1
                if chosen[row] < most[row]:
                    heapreplace(nexts, (chance * chances[row], row))
                else:
                    heappop(nexts)
            if len(order) < size:
                break
            if expected / costs[i] > rate:
                best, rate = size, expected / costs[i]
        for row in order[best:]:
            chosen[row] -= 1
        return chosen


def _bucket(num_rows: int) -> int:
    """Numbers of rows that are taken to be alike: up to eight each by itself."""
    return num_rows if num_rows <= 8 else 1 << (num_rows - 1).bit_length()

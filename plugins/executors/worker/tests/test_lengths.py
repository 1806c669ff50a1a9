"""How many tokens are guessed, on a clock that the test turns: never much worse than the best fixed number."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from lmkit_worker.lengths import SIZES, Lengths

MOST = 16
STEPS = 1500
LEARNING = 300  # steps that are not counted


def rate(seconds: Any, chances: list[float], steps: int = STEPS, seed: int = 0) -> float:
    """Tokens a second with chosen numbers, for rows whose guesses come true with `chances`."""
    rng, lengths, slots = np.random.default_rng(seed), Lengths(len(chances), MOST), list(range(len(chances)))
    tokens = spent = 0.0
    for step in range(steps):
        chosen = lengths.choose(slots)
        assert all(0 <= num <= MOST for num in chosen)
        took = seconds(sum(chosen))
        lengths.costs.learn(len(slots), sum(chosen), took)
        for slot, num in enumerate(chosen):
            wrong = np.flatnonzero(rng.random(num) >= chances[slot])
            right = int(wrong[0]) if len(wrong) else num
            lengths.learn(slot, num, right)
            tokens += (right + 1) * (step >= LEARNING)
        spent += took * (step >= LEARNING)
    return tokens / spent


def best_fixed(seconds: Any, chances: list[float]) -> float:
    """Tokens a second of the best number that is the same for all rows and steps."""
    return max(
        sum(sum(chance**i for i in range(num + 1)) for chance in chances) / seconds(num * len(chances))
        for num in range(MOST + 1)
    )


shapes = st.one_of(
    st.builds(lambda a: lambda n: 1 + a * n, st.floats(0, 2)),  # so much for each
    st.builds(
        lambda a, b: lambda n: 1 + a * (n > 0) + b * n, st.floats(0, 3), st.floats(0, 0.3)
    ),  # for guessing at all
    st.builds(lambda a, k: lambda n: 1 + a * max(0, n - k), st.floats(0, 1), st.integers(0, 40)),  # free up to so many
    st.builds(lambda a, k: lambda n: 1 + a * (n >= k), st.floats(0, 5), st.integers(1, 40)),  # a stair
)


@given(shape=shapes, chances=st.lists(st.floats(0, 1), min_size=1, max_size=6), scale=st.sampled_from([1e-4, 1.0]))
@settings(max_examples=20, deadline=None)
def test_never_much_worse_than_the_best_fixed_number(shape: Any, chances: list[float], scale: float) -> None:
    def seconds(num: int) -> float:
        return float(scale * shape(num))

    assert rate(seconds, chances) > 0.7 * best_fixed(seconds, chances)


@given(each=st.floats(0.01, 0.5), once=st.floats(0, 1), num_rows=st.integers(1, 8))
@settings(max_examples=10, deadline=None)
def test_guesses_that_are_always_wrong_cost_a_twentieth_at_most(each: float, once: float, num_rows: int) -> None:
    """At most, in units of a step without guesses."""
    found = rate(lambda num: 1 + once * (num > 0) + each * num, [0.0] * num_rows)
    assert found > 0.95 * num_rows


@given(each=st.floats(0.01, 0.5), once=st.floats(0, 2), num_tokens=st.integers(8, 64))
@settings(max_examples=10, deadline=None)
def test_rows_that_are_never_guessed_right_teach_of_those_that_follow(
    each: float, once: float, num_tokens: int
) -> None:
    """Short answers one after the other, where the guesses of each row would cost more than a twentieth."""
    lengths, seconds = Lengths(1, MOST), 0.0
    for number in range(3000):
        if number % num_tokens == 0:
            lengths.add(0)
        (chosen,) = lengths.choose([0])
        took = 1 + once * (chosen > 0) + each * chosen
        lengths.costs.learn(1, chosen, took)
        lengths.learn(0, chosen, 0)
        seconds += took * (number >= 1000)
    assert seconds < 1.05 * 2000


def test_a_row_that_is_guessed_right_is_found_among_others() -> None:
    """Rows come and go, every eighth can be guessed; a step with guesses costs half as much again."""
    lengths, right, steps = Lengths(4, MOST), 0, 0
    for number in range(4000):
        if number % 100 == 0:
            lengths.add(number // 100 % 4)
        chosen = lengths.choose([0, 1, 2, 3])
        lengths.costs.learn(4, sum(chosen), 1 + 0.5 * (sum(chosen) > 0) + 0.02 * sum(chosen))
        for slot, num in enumerate(chosen):
            good = (number // 100 - (number // 100 - slot) % 4) % 8 == 0  # the number of the row that has the slot
            lengths.learn(slot, num, num if good else 0)
            right += num if good and number >= 800 else 0
            steps += good and number >= 800
    assert right > 4 * steps


def test_a_batch_bound_by_arithmetic_guesses_nothing() -> None:
    lengths, slots, guessed = Lengths(32, MOST), list(range(32)), []
    for _ in range(400):
        chosen = lengths.choose(slots)
        guessed.append(sum(chosen))
        lengths.costs.learn(32, sum(chosen), 32.0 + sum(chosen))  # each token costs as much as a row
        for slot, num in enumerate(chosen):
            lengths.learn(slot, num, num * 7 // 10)
    assert sum(guessed[50:]) < 350 * 32 * 0.03, "little, to learn whether it still costs too much"


def test_one_slow_step_does_not_end_guessing() -> None:
    lengths, chosen = Lengths(1, MOST), []
    for step in range(100):
        (num,) = lengths.choose([0])
        lengths.costs.learn(1, num, 1 + 0.05 * num + 1000 * (step == 60))
        lengths.learn(0, num, num)
        chosen.append(num)
    assert sum(chosen[62:]) > 8 * len(chosen[62:])


def test_the_first_step_of_a_kind_may_take_long() -> None:
    """It records a graph. A stair of thousandfold first steps keeps nobody from guessing."""
    lengths, seen, chosen = Lengths(1, MOST), set(), []
    for _ in range(100):
        (num,) = lengths.choose([0])
        lengths.costs.learn(1, num, 1 + 0.05 * num + 1000 * (num not in seen))
        seen.add(num)
        lengths.learn(0, num, num)
        chosen.append(num)
    assert sum(chosen[50:]) > 8 * 50


def test_a_text_that_becomes_predictable_is_guessed_again() -> None:
    lengths, chosen = Lengths(1, MOST), []
    for step in range(400):
        (num,) = lengths.choose([0])
        lengths.costs.learn(1, num, 1 + 0.05 * num)
        lengths.learn(0, num, num if step >= 300 else 0)
        chosen.append(num)
    assert 0.05 * sum(chosen[100:300]) < 0.04 * 200
    assert sum(chosen[360:]) > 8 * 40


def test_without_a_clock_the_first_guesses_are_few_and_many_rows_have_none() -> None:
    lengths = Lengths(64, MOST)
    assert 2 <= lengths.choose([0])[0] <= 8
    assert sum(lengths.choose(list(range(32)))) == 0
    assert SIZES[0] == 0


def test_what_looked_dear_is_tried_again_though_nobody_asks_in_between() -> None:
    lengths = Lengths(1, MOST)
    for size in SIZES[:6]:
        for _ in range(4):
            lengths.costs.learn(1, size, 3.0 if size else 1.0)
    assert lengths.choose([0]) == [0]
    for _ in range(100):
        lengths.pass_by([0], 16)
        if lengths.choose([0]) != [0]:
            return
    raise AssertionError("a pause never ends")

"""Guesses against a plain search, what is kept of earlier texts, and its time."""

from collections import Counter
from time import perf_counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from lmkit_proposer_suffix.hooks import Options
from lmkit_proposer_suffix.pieces import BEFORE, PIECE
from lmkit_proposer_suffix.proposer import MOST_VOTES, Suffix
from lmkit_testing import ProposerConformance


class TestSuffix(ProposerConformance):
    plugin = "proposer:suffix"


def array(tokens: list[int]) -> np.ndarray:
    return np.array(tokens, np.int32)


def plain(text: list[int], most: int, longest: int, shortest: int) -> list[int]:
    """Token by token what the most of the places say; of equals the latest place's."""
    for length in range(min(longest, len(text)), shortest - 1, -1):
        ends = [end for end in range(length, len(text)) if text[end - length : end] == text[-length:]]
        if ends:
            following = [text[end : end + most] for end in reversed(ends)][:MOST_VOTES]
            found: list[int] = []
            for i in range(most):
                following = [f for f in following if f[:i] == found and len(f) > i]
                if not following:
                    break
                found.append(Counter(f[i] for f in following).most_common(1)[0][0])
            return found
    return []


@given(st.lists(st.integers(0, 2), max_size=40), st.integers(1, 8), st.integers(2, 4), st.integers(0, 4))
def test_says_what_a_plain_search_says(text: list[int], most: int, shortest: int, more: int) -> None:
    suffix = Suffix(shortest + more, shortest, remember=0)
    assert suffix.propose([array(text)], [most]) == [plain(text, most, shortest + more, shortest)]


def test_the_commonest_continuation_wins_over_the_latest() -> None:
    text = [1, 2, 3, 7, 7] * 2 + [1, 2, 3, 8, 8] + [1, 2, 3]
    assert Suffix(longest=3).propose([array(text)], [2]) == [[7, 7]]


def test_an_earlier_request_is_guessed_from() -> None:
    rng = np.random.default_rng(0)
    answer = rng.integers(0, 50_000, 4 * PIECE).astype(np.int32)
    suffix = Suffix()
    suffix.propose([answer], [4])
    other = np.concatenate([rng.integers(0, 50_000, 37).astype(np.int32), answer[:100]])
    assert suffix.propose([other], [16]) == [answer[100:116].tolist()]
    across = np.concatenate([other[:37], answer[: PIECE - 3]])  # the guess goes on in the next piece
    assert suffix.propose([across], [16]) == [answer[PIECE - 3 : PIECE + 13].tolist()]
    assert Suffix(remember=0).propose([answer], [4]) == [[]]


@given(st.data())
def test_memory_is_bounded_and_every_guess_stood_somewhere(data: st.DataObject) -> None:
    """Rows grow, end and come again in any order; pieces are forgotten, and each is known once."""
    suffix = Suffix(longest=4, shortest=2, remember=3 * PIECE)
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    texts = [rng.integers(0, 3, 6 * PIECE).astype(np.int32) for _ in range(3)]
    for _ in range(data.draw(st.integers(1, 12))):
        chosen = [text[: data.draw(st.integers(1, len(text)))] for text in texts]
        for text, guess in zip(chosen, suffix.propose(chosen, [5] * 3), strict=True):
            assert len(guess) <= 5
            assert all(0 <= token < 3 for token in guess)
            followed = text[-2:].tobytes() + array(guess[:1]).tobytes()
            assert not guess or any(followed in seen.tobytes() for seen in texts)
        pieces = suffix._pieces
        assert len(pieces.tokens) <= 3 * (BEFORE + PIECE)
        assert len(pieces._of) == sum(bool(content) for content in pieces._contents) <= 3
        for content, row in pieces._of.items():
            assert pieces._rows[row, BEFORE:].tobytes() == content


@pytest.mark.parametrize("tokens", [2, 1000, 50_000])
def test_a_long_text_is_read_quickly(tokens: int) -> None:
    rng = np.random.default_rng(0)
    text = rng.integers(0, tokens, 32_768).astype(np.int32)
    suffix, times = Suffix(), []
    for _ in range(300):  # what is kept is full
        suffix.propose([rng.integers(0, tokens, 4 * PIECE).astype(np.int32)], [8])
    for i in range(100):
        began = perf_counter()
        suffix.propose([text[: -100 + i]], [8])
        times.append(perf_counter() - began)
    print(f"\n{tokens} tokens: {1e6 * min(times):.1f} us, median {1e6 * sorted(times)[50]:.1f} us")
    assert min(times) < 500e-6  # docs/proposers.md has figures of a quiet machine: this finds a loop over tokens


@pytest.mark.parametrize(
    "options",
    [{"longest": 2, "shortest": 3}, {"shortest": 1}, {"longest": 65}, {"remember": -1}, {"remember": 1 << 21}],
)
def test_options_that_cannot_be(options: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"needs (2|0) <="):
        Options(**options)

"""Guesses against a plain search, what is kept of earlier texts, and its time."""

from collections import Counter
from collections.abc import Sequence
from time import perf_counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from lmkit_proposer_suffix.chains import STEPS, Chained, Texts
from lmkit_proposer_suffix.hooks import Options
from lmkit_proposer_suffix.pieces import BEFORE, PIECE, Pieces
from lmkit_proposer_suffix.proposer import MOST_PLACES, MOST_VOTES, Suffix
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
        assert len(pieces.tokens) == 3 * pieces.width
        places = [place for places in pieces._places.values() for place in places]
        assert len(set(places)) == len(places) <= 3 * (BEFORE + PIECE)
        for key, ends in pieces._places.items():
            assert 0 < len(ends) <= MOST_PLACES
            for end in ends:
                assert array(pieces.tokens[end - 1 : end + 1].tolist()).tobytes() == key
        assert len(pieces._of) == sum(bool(content) for content in pieces._contents) <= 3
        for content, row in pieces._of.items():
            assert pieces._rows[row, 1 + BEFORE :].tobytes() == content


@given(st.lists(st.integers(0, 2), max_size=200), st.data())
def test_a_text_that_grows_is_chained_as_one_that_comes_at_once(text: list[int], data: st.DataObject) -> None:
    shortest = data.draw(st.integers(2, 5))
    whole, grown = Chained(shortest), Chained(shortest)
    whole.grow(array(text))
    end = 0
    while end < len(text):
        end = data.draw(st.integers(end + 1, len(text)))
        assert grown.begins(array(text[:end]))
        grown.grow(array(text[:end]))
        alike = [
            i for i in range(shortest - 1, end - 1) if text[i + 1 - shortest : i + 1] == text[end - shortest : end]
        ]
        assert grown.latest(MOST_PLACES) == alike[::-1][:MOST_PLACES]
    assert (grown.tokens, grown._digests, grown._before, grown._heads) == (
        whole.tokens, whole._digests, whole._before, whole._heads
    )  # fmt: skip


def test_another_text_in_the_same_place_is_chained_anew() -> None:
    rng, row, suffix = np.random.default_rng(0), np.zeros(400, np.int32), Suffix(remember=0)
    for seed in range(20):
        num = int(rng.integers(1, 400))
        row[:num] = rng.integers(0, 2 + seed % 3, num)
        if seed % 2:
            row[:50] = 1  # it begins like others
        assert suffix.propose([row[:num]], [4]) == Suffix(remember=0).propose([row[:num].copy()], [4])


def test_the_memory_of_chains_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lmkit_proposer_suffix.chains.MOST_TOKENS", 100)
    texts, rows = Texts(3), [np.full(40, i, np.int32) for i in range(9)]
    for number in (0, 1, 2, 0, 3, 4, 0, *range(9)):
        texts.chained(rows[number])
        assert texts._num == sum(len(kept.tokens) for kept in texts._kept.values()) <= 100
        assert rows[number].ctypes.data in texts._kept


@pytest.mark.parametrize("tokens", [1, 2, 8, 1000, 50_000])
def test_a_look_up_is_bounded_whatever_the_text_is(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Places that are looked at for one more token of a text of 32,768: docs/proposers.md has the time that takes."""
    rng = np.random.default_rng(0)
    text, suffix = rng.integers(0, tokens, 32_768).astype(np.int32), Suffix()
    for _ in range(300):  # what is kept is full
        suffix.propose([rng.integers(0, tokens, 4 * PIECE).astype(np.int32)], [8])
    looked, times = Counter[str](), []
    latest, agreeing = Chained.latest, Pieces.agreeing

    def in_chains(chained: Chained, most: int) -> list[int]:
        before = chained._before
        chained._before = Watched(before, looked)  # type: ignore[assignment]
        found = latest(chained, most)
        chained._before = before
        return found

    suffix.propose([text[:-100]], [8])
    for i in range(100):
        began = perf_counter()
        suffix.propose([text[: i - 100]], [8])
        times.append(perf_counter() - began)
    print(f"\n{tokens} tokens: {1e6 * min(times):.1f} us, median {1e6 * sorted(times)[50]:.1f} us")
    monkeypatch.setattr(Chained, "latest", in_chains)
    for _ in range(20):
        suffix.propose([text], [8])
        assert len(agreeing(suffix._pieces, text[-3:])) <= MOST_PLACES
    assert looked["places"] <= 20 * (STEPS * MOST_PLACES + 1)


class Watched:
    """A list whose reads are counted."""

    def __init__(self, values: Sequence[int], looked: Counter[str]) -> None:
        self.values, self.looked = values, looked

    def __getitem__(self, i: int) -> int:
        self.looked["places"] += 1
        return self.values[i]


@pytest.mark.parametrize(
    "options",
    [{"longest": 2, "shortest": 3}, {"shortest": 1}, {"longest": 65}, {"remember": -1}, {"remember": 1 << 21}],
)
def test_options_that_cannot_be(options: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"needs (2|0) <="):
        Options(**options)

"""The look-up against a plain one, and its time."""

from time import perf_counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from lmkit_proposer_ngram.hooks import Options
from lmkit_proposer_ngram.proposer import LATE, Ngram
from lmkit_testing import ProposerConformance


class TestNgram(ProposerConformance):
    plugin = "proposer:ngram"


def plain(text: list[int], most: int, longest: int, shortest: int) -> list[int]:
    for length in range(min(longest, len(text) - 1), shortest - 1, -1):
        for end in range(len(text) - 1, length - 1, -1):
            if text[end - length : end] == text[-length:]:
                return text[end : end + most]
    return []


@given(st.lists(st.integers(0, 3), min_size=1, max_size=40), st.integers(1, 8), st.integers(1, 4), st.integers(0, 4))
def test_finds_what_a_plain_search_finds(text: list[int], most: int, shortest: int, more: int) -> None:
    found = Ngram(shortest + more, shortest).propose([np.array(text, np.int32)], [most])
    assert found == [plain(text, most, shortest + more, shortest)]


@pytest.mark.parametrize("tokens", [2, 3, 8])
def test_finds_the_same_where_a_token_stands_in_many_places(tokens: int) -> None:
    text = np.random.default_rng(tokens).integers(0, tokens, 3 * LATE).astype(np.int32)
    for shortest, longest in ((1, 4), (2, 4), (2, 12), (3, 7)):
        for end in range(len(text) - 5, len(text)):
            wanted = plain(text[:end].tolist(), 5, longest, shortest)
            assert Ngram(longest, shortest).propose([text[:end]], [5]) == [wanted]


def test_finds_what_stands_far_back() -> None:
    text = np.arange(3 * LATE, dtype=np.int32)
    text[-2:] = text[5:7]
    assert Ngram().propose([text], [3]) == [[7, 8, 9]]
    text[-4:] = text[-LATE : 4 - LATE] = text[5:9]  # as long a run, nearer
    assert Ngram().propose([text], [2]) == [text[4 - LATE : 6 - LATE].tolist()]


def test_copies() -> None:
    text = np.array([7, 1, 2, 3, 4, 5, 6, 9, 1, 2, 3], np.int32)
    assert Ngram().propose([text, text[:5]], [2, 2]) == [[4, 5], []]


@pytest.mark.parametrize("tokens", [1, 2, 8, 1000, 50_000])
def test_a_long_text_is_read_quickly(tokens: int) -> None:
    text = np.random.default_rng(0).integers(0, tokens, 32_768).astype(np.int32)
    ngram, times = Ngram(), []
    for _ in range(50):
        began = perf_counter()
        ngram.propose([text], [8])
        times.append(perf_counter() - began)
    print(f"\n{tokens} tokens: {1e6 * min(times):.1f} us, median {1e6 * sorted(times)[25]:.1f} us")
    assert min(times) < 300e-6  # 30 us on a quiet machine: this finds what reads it token by token


@pytest.mark.parametrize(("longest", "shortest"), [(2, 3), (0, 0), (65, 1)])
def test_options_that_contradict_each_other(longest: int, shortest: int) -> None:
    with pytest.raises(ValueError, match="shortest"):
        Options(longest, shortest)

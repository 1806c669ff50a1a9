"""Conformance of proposers that read texts alone."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import pytest
from lmkit.api import Proposer, SamplingParams

from lmkit_testing.specs import PluginConformance
from lmkit_testing.toy import TOY_VOCAB
from lmkit_testing.toy_engine import ToyEngine


class Watched:
    """Checks each answer of a proposer, and that it leaves the texts as they are."""

    def __init__(self, proposer: Proposer) -> None:
        self.proposer = proposer

    def propose(self, texts: Sequence[np.ndarray], most: Sequence[int]) -> list[list[int]]:
        before = [text.copy() for text in texts]
        guesses = self.proposer.propose(texts, most)
        assert len(guesses) == len(texts), "one list for each text"
        for text, was, guess, limit in zip(texts, before, guesses, most, strict=True):
            assert np.array_equal(text, was), "a text belongs to its row: it is read only"
            assert len(guess) <= limit, "no more than was asked for"
            assert all(type(token) is int for token in guess), "tokens are plain integers: they cross processes"
            assert all(0 <= token < TOY_VOCAB for token in guess), "tokens of the vocabulary"
        return guesses


class ProposerConformance(PluginConformance):
    """A proposer of any quality passes: it must only keep its promises, and cannot change a token."""

    options: ClassVar[dict[str, Any]] = {}  # of the target

    @pytest.fixture
    def proposer(self, target: Any) -> Watched:
        return Watched(target(**self.options))

    @pytest.mark.parametrize("seed", range(5))
    def test_rows_come_grow_and_leave(self, proposer: Watched, seed: int) -> None:
        """Any texts in any order, among them one token, long ones, and a row whose text became another."""
        rng = random.Random(seed)
        rows = np.zeros((4, 600), np.int32)
        lengths = [0] * 4
        for _ in range(60):
            for i in range(4):
                if rng.random() < 0.2 or lengths[i] > 560:  # another row takes the place
                    lengths[i] = rng.choice([1, 2, 30, 500])
                    rows[i, : lengths[i]] = [rng.randrange(rng.choice([1, 3, TOY_VOCAB])) for _ in range(lengths[i])]
                more = rng.choice([1, 1, 2, 17])
                rows[i, lengths[i] : lengths[i] + more] = rows[i, :more] if rng.random() < 0.5 else rng.randrange(9)
                lengths[i] += more
            asked = rng.sample(range(4), rng.randint(1, 4))
            proposer.propose([rows[i, : lengths[i]] for i in asked], [rng.choice([1, 2, 16]) for _ in asked])

    def test_no_token_changes(self, proposer: Watched) -> None:
        prompts = [[5, 6, 7, 8] * 3, [1, 2], list(range(20)), [3] * 9]
        for params in (
            SamplingParams(temperature=0, max_tokens=40, ignore_eos=True),
            SamplingParams(temperature=1, seed=1, max_tokens=40, frequency_penalty=0.5, logprobs=1),
        ):
            asked = [params] * len(prompts)
            assert ToyEngine(proposer=proposer).tokens(prompts, asked) == ToyEngine().tokens(prompts, asked)

    def test_what_is_seen_decides(self, proposer: Watched, target: Any) -> None:
        """Two that saw the same say the same: nothing is drawn, and no clock is read."""
        other = Watched(target(**self.options))
        rng = np.random.default_rng(0)
        for _ in range(20):
            texts = [rng.integers(0, 3, rng.integers(1, 200)).astype(np.int32) for _ in range(3)]
            assert proposer.propose(texts, [4] * 3) == other.propose(texts, [4] * 3)

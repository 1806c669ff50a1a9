"""Votes of the places that agree with the most of the last tokens (after Oliaro et al. 2024, arXiv:2411.04975,
"SuffixDecoding"). The paths of a suffix tree are found by comparing, since reading 32,768 tokens takes ten microseconds
and a tree of them many megabytes for each row."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from lmkit_proposer_suffix.pieces import Pieces

MOST_PLACES = 64  # the latest are compared
MOST_VOTES = 16  # the latest of those that agree
LATE = 2048  # tokens that are looked at before all others


class Suffix:
    """Knows no rows: a text is looked at as it is, and what it has grown by is kept in pieces for later ones."""

    def __init__(self, longest: int = 8, shortest: int = 3, remember: int = 16_384) -> None:
        self._back = np.arange(longest)
        self._shortest = shortest
        self._pieces = Pieces(remember)

    def propose(self, texts: Sequence[np.ndarray], most: Sequence[int]) -> list[list[int]]:
        """Contract: lmkit.api.Proposer."""
        guesses = [self._guess(text, limit) for text, limit in zip(texts, most, strict=True)]
        for text in texts:
            self._pieces.keep(text)
        return guesses

    def _guess(self, text: np.ndarray, most: int) -> list[int]:
        if len(text) < self._shortest or most < 1:
            return []
        last = text[: -len(self._back) - 1 : -1]
        here, length = self._agreeing(text[:-1], last)
        there, other = self._agreeing(self._pieces.tokens, last, self._pieces.width)
        longest = max(length, other)
        if longest < self._shortest:
            return []
        following = [text[end + 1 : end + 1 + most].tolist() for end in here] if length == longest else []
        if other == longest:
            following += [self._pieces.after(end, most) for end in there]
        return vote(following, most)

    def _agreeing(self, tokens: np.ndarray, last: np.ndarray, width: int = 0) -> tuple[list[int], int]:
        """Where runs end that agree with the most of `last`, the latest first, and how many tokens agree.

        `last`: the last tokens backwards. `width`: of pieces that do not follow one another; 0: there are none.
        """
        ends = np.empty(0, np.int64)
        for first in (len(tokens) - LATE, 0):  # where the last two tokens stand everywhere, the first look has enough
            if first >= 0 and len(ends) < MOST_PLACES and not (first and width):
                pairs = (tokens[first + 1 :] == last[0]) & (tokens[first:-1] == last[1])
                ends = np.flatnonzero(pairs)[: -MOST_PLACES - 1 : -1] + (first + 1)
        if not len(ends):
            return [], 0
        wrong = tokens[ends[:, None] - self._back[: len(last)]] != last
        lengths = np.where(wrong.any(1), wrong.argmax(1), len(last))
        lengths = np.minimum(lengths, (ends % width if width else ends) + 1)  # a run begins where its text begins
        most = int(lengths.max())
        return ends[lengths == most][:MOST_VOTES].tolist(), most


def vote(following: Sequence[list[int]], most: int) -> list[int]:
    """Token by token the one that stands in most of the texts that agree so far; of equals that of the first text."""
    found: list[int] = []
    while len(found) < most:
        i = len(found)
        tokens = [text[i] for text in following if len(text) > i]
        if not tokens:
            break
        found.append(Counter(tokens).most_common(1)[0][0])
        following = [text for text in following if len(text) > i and text[i] == found[i]]
        if len(following) == 1:
            return following[0][:most]
    return found

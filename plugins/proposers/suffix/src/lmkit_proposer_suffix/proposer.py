"""Votes of the places that agree with the most of the last tokens (after Oliaro et al. 2024, arXiv:2411.04975,
"SuffixDecoding"). The paths of a suffix tree are found by comparing a bounded number of places, which takes a tenth of
the memory that a tree takes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lmkit_proposer_suffix.chains import Texts
from lmkit_proposer_suffix.pieces import Pieces

MOST_PLACES = 24  # the latest are compared
MOST_VOTES = 16  # the latest of those that agree


class Suffix:
    """What it says follows from the text and from what was said of others. A text is chained as it grows, and what it
    has grown by is kept in pieces for later ones."""

    def __init__(self, longest: int = 8, shortest: int = 3, remember: int = 16_384) -> None:
        self._longest, self._shortest = longest, shortest
        self._texts = Texts(shortest)
        self._pieces = Pieces(remember, shortest, MOST_PLACES)

    def propose(self, texts: Sequence[np.ndarray], most: Sequence[int]) -> list[list[int]]:
        """Contract: lmkit.api.Proposer."""
        guesses = [self._guess(text, limit) for text, limit in zip(texts, most, strict=True)]
        for text in texts:
            self._pieces.keep(text)
        return guesses

    def _guess(self, text: np.ndarray, most: int) -> list[int]:
        if len(text) < self._shortest or most < 1:
            return []
        last = text[-self._longest :].tolist()[::-1]
        chained = self._texts.chained(text)
        here, longest = self._longest_of(chained.tokens, chained.latest(MOST_PLACES), last, chained.data)
        following = [text[end + 1 : end + 1 + most].tolist() for end in here]
        if len(here) < MOST_VOTES or longest < len(last):
            found = self._pieces.agreeing(text[-self._shortest :])
            there, length = self._longest_of(self._pieces.tokens, found, last)
            if length >= longest:
                following = following if length == longest else []
                following += [self._pieces.after(end, most) for end in there[: MOST_VOTES - len(following)]]
        return vote(following, most)

    def _longest_of(
        self, tokens: Sequence[int], places: Sequence[int], last: Sequence[int], data: bytearray | None = None
    ) -> tuple[list[int], int]:
        """Those of the `places`, the latest first, that agree with the most of `last`, the last tokens backwards, and
        with how many; they all do with `shortest`. `data`: the tokens as int32, where the last of them are `last`."""
        num = len(last)
        if data is not None and places and data.startswith(ends := data[-4 * num :], 4 * (places[0] + 1 - num)):
            return [place for place in places if data.startswith(ends, 4 * (place + 1 - num))][:MOST_VOTES], num
        found: list[int] = []
        longest = 0
        for place in places:
            length, room = self._shortest, num if place >= num else place + 1
            while length < room and tokens[place - length] == last[length]:
                length += 1
            if length > longest:
                found, longest = [place], length
            elif length == longest:
                found.append(place)
                if length == num and len(found) == MOST_VOTES:
                    break
        return found[:MOST_VOTES], longest


def vote(following: Sequence[list[int]], most: int) -> list[int]:
    """Token by token the one that stands in most of the texts that agree so far; of equals that of the first text."""
    whole = following[-1] if following else []  # most follows the earliest place
    if not following or (following[0] == whole[: len(following[0])] and all(t == whole[: len(t)] for t in following)):
        return whole[:most]
    found: list[int] = []
    while len(found) < most:
        i = len(found)
        following = [text for text in following if len(text) > i]
        if len(following) < 2:
            return following[0][:most] if following else found
        tokens = [text[i] for text in following]
        best = tokens[0]
        if 2 * tokens.count(best) < len(tokens):
            best = max(dict.fromkeys(tokens), key=tokens.count)
        if tokens.count(best) < len(tokens):
            following = [text for text in following if text[i] == best]
        found.append(best)
    return found

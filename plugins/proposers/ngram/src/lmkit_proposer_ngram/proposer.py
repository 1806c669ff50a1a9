"""Look-up of the last tokens in the text so far (Yang et al. 2023, arXiv:2304.04487, "Inference with Reference")."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

LATE = 2048  # tokens that are looked at before all others where the last token stands everywhere: they are enough
EVERYWHERE = 4  # it is one of so many tokens, or fewer
MANY = 256  # places of a token: of more, those are listed that agree in two


class Ngram:
    """Keeps nothing between steps: a look-up reads the text once."""

    def __init__(self, longest: int = 4, shortest: int = 2) -> None:
        self._longest, self._shortest = longest, shortest

    def propose(self, texts: Sequence[np.ndarray], most: Sequence[int]) -> list[list[int]]:
        """Contract: lmkit.api.Proposer."""
        return [self._guess(text, limit) for text, limit in zip(texts, most, strict=True)]

    def _guess(self, text: np.ndarray, most: int) -> list[int]:
        """What stands behind the latest of the places that agree with the most of the last tokens."""
        late, length = text[-LATE:], 0
        if EVERYWHERE * np.count_nonzero(late == text[-1]) >= len(late):
            first, length = self._find(late)  # a run as long as can be, where it stood last
            first += len(text) - len(late)
        if length < self._longest:
            first, length = self._find(text)
        return text[first : first + most].tolist() if length >= self._shortest else []

    def _find(self, text: np.ndarray) -> tuple[int, int]:
        """Where what follows the latest of the longest runs begins, and how long that run is, at most `longest`."""
        same, length = text[:-1] == text[-1], 1  # where the last token stood before
        if self._shortest > 1 and len(text) > 2 and np.count_nonzero(same) > MANY:
            same[0], length = False, 2
            same[1:] &= text[:-2] == text[-2]
        ends = np.flatnonzero(same)
        while length < self._longest and len(ends):
            within = ends[np.searchsorted(ends, length) :]  # a longer run begins within the text
            longer = within[text[within - length] == text[-1 - length]]
            if not len(longer):
                break
            ends, length = longer, length + 1
        return (int(ends[-1]) + 1, length) if len(ends) else (0, 0)

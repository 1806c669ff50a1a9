"""Look-up of the last tokens in the text so far (Yang et al. 2023, arXiv:2304.04487, "Inference with Reference")."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


class Ngram:
    """Keeps nothing between steps: a look-up reads the text once."""

    def __init__(self, longest: int = 4, shortest: int = 2) -> None:
        self._longest, self._shortest = longest, shortest

    def propose(self, texts: Sequence[np.ndarray], most: Sequence[int]) -> list[list[int]]:
        """Contract: lmkit.api.Proposer."""
        return [self._guess(text, limit) for text, limit in zip(texts, most, strict=True)]

    def _guess(self, text: np.ndarray, most: int) -> list[int]:
        """What stands behind the latest of the places that agree with the most of the last tokens."""
        ends = np.flatnonzero(text[:-1] == text[-1])  # where the last token stood before
        length = 1
        while length < self._longest and len(ends):
            within = ends[np.searchsorted(ends, length) :]  # a longer run begins within the text
            longer = within[text[within - length] == text[-1 - length]]
            if not len(longer):
                break
            ends, length = longer, length + 1
        if length < self._shortest or not len(ends):
            return []
        first = int(ends[-1]) + 1
        return text[first : first + most].tolist()

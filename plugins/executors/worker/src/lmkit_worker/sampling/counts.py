"""Occurrences of tokens in one row, for penalties: counted once per token, never rebuilt."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np


class TokenCounts:
    """Distinct tokens of a row's prompt and output with the number of times each is in the output."""

    __slots__ = ("_ids", "_index", "_output", "_size")

    def __init__(self, prompt: np.ndarray, output: Iterable[int] = ()) -> None:
        distinct = np.unique(prompt)
        self._size = len(distinct)
        room = max(64, 2 * self._size)
        self._ids = np.zeros(room, np.int64)
        self._ids[: self._size] = distinct
        self._output = np.zeros(room, np.float32)
        self._index = {token: i for i, token in enumerate(distinct.tolist())}
        for token in output:
            self.add(token)

    def add(self, token: int) -> None:
        """One more output token."""
        i = self._index.get(token)
        if i is None:
            i = self._index[token] = self._size
            if i == len(self._ids):
                self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
                self._output = np.concatenate([self._output, np.zeros_like(self._output)])
            self._ids[i] = token
            self._size += 1
        self._output[i] += 1.0

    @property
    def ids(self) -> np.ndarray:
        """[U] int64, distinct tokens of prompt and output: a view."""
        return self._ids[: self._size]

    @property
    def output(self) -> np.ndarray:
        """[U] float32, how often each is in the output: a view."""
        return self._output[: self._size]

    def with_drafts(self, drafts: Iterable[int]) -> tuple[np.ndarray, np.ndarray]:
        """(ids, output) as if `drafts` had been added."""
        ids, output = self.ids.tolist(), self.output.tolist()
        index = dict(self._index)
        for token in drafts:
            i = index.setdefault(token, len(ids))
            if i == len(ids):
                ids.append(token)
                output.append(0.0)
            output[i] += 1.0
        return np.array(ids, np.int64), np.array(output, np.float32)

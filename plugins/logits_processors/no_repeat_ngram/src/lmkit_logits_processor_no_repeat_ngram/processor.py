"""Bans tokens that would complete a run of tokens for the second time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

if TYPE_CHECKING:
    from lmkit.api import SampleContext, SamplingParams
    from torch import Tensor

LARGEST = 1024


@dataclass(frozen=True, slots=True)
class Options:
    """What a request says under `no_repeat_ngram`."""

    size: int  # of the run

    def __post_init__(self) -> None:
        if type(self.size) is not int or not 1 <= self.size <= LARGEST:
            raise ValueError(f"size is {self.size!r}, needs an integer from 1 to {LARGEST}")


class NoRepeatNgram:
    """Contract: lmkit.api.LogitsProcessor. Nothing is kept of a row but its size: each step reads the text once."""

    stage: Literal["logits"] = "logits"
    keeps_argmax = False
    options = Options

    def __init__(self) -> None:
        self._sizes: dict[int, int] = {}  # by slot

    def add(self, slot: int, params: SamplingParams, prompt: Sequence[int]) -> bool:
        self._sizes[slot] = Options(**params.extra["no_repeat_ngram"]).size  # type: ignore[arg-type] # as was checked
        return True

    def remove(self, slot: int) -> None:
        del self._sizes[slot]

    def apply(self, logits: Tensor, ctx: SampleContext) -> None:
        """In place; a row all of whose tokens are banned is left to the sampler, which says so."""
        for row, slot in enumerate(ctx.slots):
            banned = completions(np.asarray(ctx.tokens(row), np.int64), self._sizes[slot])
            logits[row, logits.new_tensor(banned).long()] = -float("inf")


def completions(text: np.ndarray, size: int) -> np.ndarray:
    """Tokens that followed the last size - 1 tokens of `text` [n] wherever else these stood in it."""
    if len(text) < size:
        return text[:0]
    places = np.ones(len(text) - size + 1, bool)  # where a run of `size` tokens begins
    for i in range(size - 1):
        places &= text[i : i + len(places)] == text[len(text) - size + 1 + i]
    return np.unique(text[size - 1 :][places])

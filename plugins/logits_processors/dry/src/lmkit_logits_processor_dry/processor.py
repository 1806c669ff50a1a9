"""Don't repeat yourself: the penalty of p-e-w's DRY sampler (text-generation-webui, pull request 5677)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import TYPE_CHECKING, Literal

import numpy as np

if TYPE_CHECKING:
    from lmkit.api import SampleContext, SamplingParams
    from torch import Tensor

LONGEST = 64  # tokens of a run that are compared: a longer one is penalized like one of this length
MOST = 1e4  # of a penalty
MAX_BREAKERS = 256


@dataclass(frozen=True, slots=True)
class Options:
    """What a request says under `dry`. A token that would make a run of n tokens one of n + 1 that was there before
    loses multiplier * base ** (n - allowed_length), from n = allowed_length on."""

    multiplier: float = 0.8
    base: float = 1.75
    allowed_length: int = 2
    breakers: list[int] = field(default_factory=list)  # ids of tokens over which no run goes: line ends, quotes

    def __post_init__(self) -> None:
        for name, low, high in (("multiplier", 0.0, 100.0), ("base", 1.0, 10.0)):
            value = getattr(self, name)
            if type(value) not in (int, float) or not isfinite(value) or not low <= value <= high:
                raise ValueError(f"{name} is {value!r:.40}, needs a number from {low} to {high}")
        if type(self.allowed_length) is not int or not 1 <= self.allowed_length <= LONGEST:
            raise ValueError(f"allowed_length is {self.allowed_length!r:.40}, needs an integer from 1 to {LONGEST}")
        ids = self.breakers
        if not isinstance(ids, list) or len(ids) > MAX_BREAKERS or not all(type(i) is int and i >= 0 for i in ids):
            raise ValueError(f"breakers needs at most {MAX_BREAKERS} token ids")


class Dry:
    """Contract: lmkit.api.LogitsProcessor. Nothing is kept of a row but its options: each step reads the text once."""

    stage: Literal["logits"] = "logits"
    keeps_argmax = False
    options = Options

    def __init__(self) -> None:
        self._asked: dict[int, Options] = {}  # by slot

    def add(self, slot: int, params: SamplingParams, prompt: Sequence[int]) -> bool:
        asked = Options(**params.extra["dry"])  # type: ignore[arg-type] # as was checked
        if not asked.multiplier:
            return False
        self._asked[slot] = asked
        return True

    def remove(self, slot: int) -> None:
        del self._asked[slot]

    def apply(self, logits: Tensor, ctx: SampleContext) -> None:
        for row, slot in enumerate(ctx.slots):
            asked = self._asked[slot]
            ids, lengths = repeats(np.asarray(ctx.tokens(row), np.int64), asked.breakers)
            wanted = lengths >= asked.allowed_length
            grown = np.minimum(lengths[wanted] - asked.allowed_length, LONGEST)
            penalty = np.minimum(asked.multiplier * float(asked.base) ** grown, MOST)
            logits[row, logits.new_tensor(ids[wanted]).long()] -= logits.new_tensor(penalty)


def repeats(text: np.ndarray, breakers: Sequence[int] = ()) -> tuple[np.ndarray, np.ndarray]:
    """Tokens that followed, elsewhere in `text` [n], what its end agrees with, and how many tokens agree at most."""
    if len(text) < 2 or text[-1] in breakers:
        return text[:0], text[:0]
    ends = np.flatnonzero(text[:-1] == text[-1])  # runs that end like the text
    back = np.arange(LONGEST)
    broken = np.isin(text[::-1][:LONGEST], list(breakers))
    most = int(broken.argmax()) if broken.any() else LONGEST  # of the end, up to the last breaker
    places = ends[:, None] - back[: min(most, len(text))]
    agree = (text[np.maximum(places, 0)] == text[::-1][: places.shape[1]]) & (places >= 0)
    lengths = np.where(agree.all(1), agree.shape[1], agree.argmin(1))
    ids, which = np.unique(text[ends + 1], return_inverse=True)
    found = np.zeros(len(ids), np.int64)
    np.maximum.at(found, which, lengths)
    return ids, found

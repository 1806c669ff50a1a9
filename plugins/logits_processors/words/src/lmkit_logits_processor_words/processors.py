"""Tokens that may come, and runs of tokens that may not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch

if TYPE_CHECKING:
    from lmkit.api import SampleContext, SamplingParams
    from torch import Tensor

MAX_ALLOWED = 1 << 17
MAX_RUNS = 1024
MAX_RUN = 64  # tokens
LARGEST = 1 << 31


def _check(ids: object, what: str, most: int) -> None:
    """Raises ValueError."""
    if not isinstance(ids, list) or not 0 < len(ids) <= most:
        raise ValueError(f"{what} needs 1 to {most} token ids")
    if bad := [i for i in ids if type(i) is not int or not 0 <= i < LARGEST]:
        raise ValueError(f"{what} has {bad[0]!r:.40}, which is no token id")


@dataclass(frozen=True, slots=True)
class Allowed:
    """What a request says under `allowed_token_ids`. An answer ends only where an end token is among them."""

    ids: list[int]

    def __post_init__(self) -> None:
        _check(self.ids, "ids", MAX_ALLOWED)


class AllowedTokens:
    """Contract: lmkit.api.LogitsProcessor."""

    stage: Literal["logits"] = "logits"
    keeps_argmax = False
    options = Allowed

    def __init__(self) -> None:
        self._ids: dict[int, Tensor] = {}  # by slot, on the device of the logits once they are there

    def add(self, slot: int, params: SamplingParams, prompt: Sequence[int]) -> bool:
        asked = Allowed(**params.extra["allowed_token_ids"])  # type: ignore[arg-type] # as was checked
        self._ids[slot] = torch.tensor(sorted(set(asked.ids)))
        return True

    def remove(self, slot: int) -> None:
        del self._ids[slot]

    def apply(self, logits: Tensor, ctx: SampleContext) -> None:
        """In place; a row none of whose tokens is allowed is left to the sampler, which says so."""
        for row, slot in enumerate(ctx.slots):
            ids = self._ids[slot] = self._ids[slot].to(logits.device)
            ids = ids[ids < logits.shape[1]]
            kept = logits[row, ids]
            logits[row].fill_(-float("inf"))
            logits[row, ids] = kept


@dataclass(frozen=True, slots=True)
class Bad:
    """What a request says under `bad_words`: each as the tokens it is written with, in all ways that are meant."""

    ids: list[list[int]]

    def __post_init__(self) -> None:
        if not isinstance(self.ids, list) or not 0 < len(self.ids) <= MAX_RUNS:
            raise ValueError(f"ids needs 1 to {MAX_RUNS} lists of token ids")
        for i, run in enumerate(self.ids):
            _check(run, f"ids[{i}]", MAX_RUN)


class BadWords:
    """Contract: lmkit.api.LogitsProcessor. The last token of a run cannot be drawn where all others stand before it."""

    stage: Literal["logits"] = "logits"
    keeps_argmax = False
    options = Bad

    def __init__(self) -> None:
        self._runs: dict[int, list[tuple[list[int], int]]] = {}  # by slot: all tokens of a run but the last, the last

    def add(self, slot: int, params: SamplingParams, prompt: Sequence[int]) -> bool:
        asked = Bad(**params.extra["bad_words"])  # type: ignore[arg-type] # as was checked
        self._runs[slot] = [(run[:-1], run[-1]) for run in asked.ids]
        return True

    def remove(self, slot: int) -> None:
        del self._runs[slot]

    def apply(self, logits: Tensor, ctx: SampleContext) -> None:
        for row, slot in enumerate(ctx.slots):
            runs, text = self._runs[slot], list(ctx.tokens(row))
            banned = [last for before, last in runs if not before or text[-len(before) :] == before]
            banned = [token for token in banned if token < logits.shape[1]]
            logits[row, logits.new_tensor(banned).long()] = -float("inf")

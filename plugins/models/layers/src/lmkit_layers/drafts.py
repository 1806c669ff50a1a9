"""Drafts: models that guess for another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from lmkit.api import StepInputs
from torch import Tensor


class DraftProposer(Protocol):
    """A proposer that runs a model of its own, the draft. Constructed as target(draft, model, **options).

    The draft's layers stand behind the model's: they have blocks of the row, and run over the tokens of each step with
    its plans, then over guesses, one token of each row at a time. Where a guess has no place left the row gets none.
    What they hold may be wrong, where the prefix cache gave blocks or a guess was: that costs guesses only.
    """

    reads_hidden: bool  # it reads at each place the model's hidden state there, and the token that follows
    children: Sequence[int] = ()  # guesses after each at each depth, if it reads hidden states; (): chains

    def enter(self, token_ids: Tensor, hidden: Tensor | None) -> Tensor | None:
        """What enters the layers in place of embeddings: [T, D], or None.

        `hidden` [T, H]: the model's hidden states in a step (`Model.forward`), then those that `state` gave.
        """
        ...

    def state(self, x: StepInputs) -> Tensor:
        """The draft's hidden states of `x.logits_rows` [S, D], or of all tokens [T, D]: a pure function, as a model's
        is."""
        ...

    def guess(self, state: Tensor) -> Tensor:
        """The tokens that follow, likeliest first: [S, D] -> [S, K]. A draft without layers guesses no others."""
        ...

    def branch(self, state: Tensor, num: int) -> tuple[Tensor, Tensor]:
        """The `num` likeliest tokens that may come next, and the logarithms of their probabilities: [S, D] -> [S, num]
        each, likeliest first. Asked where there are `children`, whose attention needs say `tree`."""
        ...

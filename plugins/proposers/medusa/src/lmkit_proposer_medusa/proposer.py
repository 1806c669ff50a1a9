"""Heads that read one hidden state and guess a token each (Cai et al. 2024, arXiv:2401.10774)."""

from __future__ import annotations

from lmkit.api import Model, StepInputs
from lmkit_layers import DraftProposer
from torch import Tensor


class Medusa(DraftProposer):
    """Guesses the likeliest token of each head: a chain, not a tree."""

    reads_hidden = True

    def __init__(self, draft: Model, target: Model, /, model: str) -> None:
        self._draft = draft

    def enter(self, token_ids: Tensor, hidden: Tensor | None) -> Tensor | None:
        """Contract: lmkit_layers.DraftProposer."""
        return hidden

    def state(self, x: StepInputs) -> Tensor:
        """Contract: lmkit_layers.DraftProposer."""
        return self._draft.forward(x)

    def guess(self, state: Tensor) -> Tensor:
        """Contract: lmkit_layers.DraftProposer."""
        return self._draft.logits(state).argmax(-1)

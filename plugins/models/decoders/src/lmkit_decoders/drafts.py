"""Drafts of proposers: decoders that guess one token after the other."""

from __future__ import annotations

from lmkit.api import DraftProposer, Model, StepInputs
from torch import Tensor


class Chain(DraftProposer):
    """A draft that reads tokens, as any decoder does."""

    reads_hidden = False

    def __init__(self, draft: Model, model: Model, /) -> None:
        self.draft = draft

    def enter(self, token_ids: Tensor, hidden: Tensor | None) -> Tensor | None:
        """Contract: lmkit.api.DraftProposer."""
        return None

    def state(self, x: StepInputs) -> Tensor:
        """Contract: lmkit.api.DraftProposer."""
        return self.draft.forward(x)

    def guess(self, state: Tensor) -> Tensor:
        """Contract: lmkit.api.DraftProposer."""
        return self.draft.logits(state).argmax(-1, keepdim=True)

"""Heads that go on from the model's hidden states (Li et al., arXiv:2401.15077 and arXiv:2503.01840)."""

from __future__ import annotations

from lmkit.api import Model
from lmkit_decoders import HeadDecoder, HiddenChain
from torch import Tensor


class Eagle(HiddenChain):
    """Guesses the likeliest token each time."""

    def __init__(self, draft: HeadDecoder, target: Model, /, model: str) -> None:
        super().__init__(draft, target)
        self._known = getattr(draft, "known", None)

    def guess(self, state: Tensor) -> Tensor:
        """Contract: lmkit_layers.DraftProposer."""
        ids = super().guess(state)
        return ids if self._known is None else self._known(ids)

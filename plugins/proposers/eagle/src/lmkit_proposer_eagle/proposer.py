"""Heads that go on from the model's hidden states (Li et al., arXiv:2401.15077, arXiv:2406.16858, arXiv:2503.01840)."""

from __future__ import annotations

from lmkit.api import Model
from lmkit_decoders import HeadDecoder, HiddenChain
from torch import Tensor

from lmkit_proposer_eagle.arch import children


class Eagle(HiddenChain):
    """Guesses the likeliest token each time, or a tree of the likeliest."""

    def __init__(self, draft: HeadDecoder, target: Model, /, model: str, tree: str) -> None:
        super().__init__(draft, target)
        self.children = children(tree)

    def known(self, ids: Tensor) -> Tensor:
        """The model's ids of the head's: EAGLE-3 has a vocabulary of its own."""
        known = getattr(self.draft, "known", None)
        return ids if known is None else known(ids)

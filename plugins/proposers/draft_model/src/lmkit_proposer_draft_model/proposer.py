"""A second, smaller model that goes on with the text (Leviathan et al. 2023, arXiv:2211.17192)."""

from __future__ import annotations

from lmkit.api import Model
from lmkit_decoders import Chain


class DraftModel(Chain):
    """Guesses the likeliest token each time."""

    def __init__(self, draft: Model, target: Model, /, model: str) -> None:
        super().__init__(draft, target)

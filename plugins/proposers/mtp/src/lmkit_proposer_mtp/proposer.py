"""The layer of a checkpoint that predicts the token after the next, again and again (DeepSeek-V3, arXiv:2412.19437)."""

from __future__ import annotations

from lmkit_decoders import HiddenChain


class Mtp(HiddenChain):
    """Guesses the likeliest token each time."""

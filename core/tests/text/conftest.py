"""Tokenizers for the tests."""

from lmkit_testing.tokenizers import byte_level, data, real, sentencepiece_like

__all__ = ["byte_level", "data", "real", "sentencepiece_like"]

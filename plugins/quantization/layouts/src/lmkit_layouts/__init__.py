"""Bit layouts of quantized checkpoints. Importing this does not import torch."""

from lmkit_layouts.grouped import AwqWords, GptqWords, GroupedIntegers
from lmkit_layouts.settings import Settings

__all__ = ["AwqWords", "GptqWords", "GroupedIntegers", "Settings"]

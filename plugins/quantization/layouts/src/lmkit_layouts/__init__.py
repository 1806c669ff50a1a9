"""Bit layouts of quantized checkpoints. Importing this does not import torch."""

from lmkit_layouts.floats import FloatFormat, Floats, Fp8Format, Rounding
from lmkit_layouts.fp4 import Fp4Format, MxFp4, NvFp4
from lmkit_layouts.grouped import AwqWords, GptqWords, GroupedIntegers
from lmkit_layouts.rows import ByteRows, OffsetRows, PackedRows
from lmkit_layouts.settings import Settings

__all__ = [
    "AwqWords",
    "ByteRows",
    "FloatFormat",
    "Floats",
    "Fp4Format",
    "Fp8Format",
    "GptqWords",
    "GroupedIntegers",
    "MxFp4",
    "NvFp4",
    "OffsetRows",
    "PackedRows",
    "Rounding",
    "Settings",
]

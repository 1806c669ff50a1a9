"""Loader `dummy`: random weights of the shapes that the architecture wants, for benchmarks and plans of memory.

No file of weights is read, or needed. Values follow from the parameter's name and the seed alone, so that they are the
same in every process and on every rank.
"""

from __future__ import annotations

import zlib

import torch
from lmkit.api import Checkpoint, TensorEntry
from torch import Tensor

SPREAD = 0.02  # standard deviation, as models are initialised
PERIOD = 1_048_573  # numbers that are drawn; a prime, so that rows of a matrix differ nevertheless
WARNING = "weights are random (loader dummy): answers mean nothing"


class DummyLoader:
    """Has no tensors: parameters are given values instead."""

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed

    def tensors(self, checkpoint: Checkpoint) -> list[TensorEntry]:
        return []

    def read(self, entry: TensorEntry) -> Tensor:
        raise KeyError(entry.name)

    def release(self) -> None:
        return None

    def values(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Normally distributed, on the CPU."""
        generator = torch.Generator().manual_seed(zlib.crc32(f"{self.seed} {name}".encode()))
        out = torch.empty(shape, dtype=dtype)
        flat = out.view(-1)
        some = torch.randn(min(PERIOD, len(flat)), generator=generator).mul_(SPREAD).to(dtype)
        for first in range(0, len(flat), PERIOD):
            flat[first : first + PERIOD] = some[: len(flat) - first]
        return out

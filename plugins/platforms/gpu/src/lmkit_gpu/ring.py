"""Weights on their way to the device, through pinned memory that is used again and again."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from lmkit_gpu.runtime import Runtime

if TYPE_CHECKING:
    import torch
    from torch import Tensor

PIECE = 16 << 20  # bytes that are sent together; smaller tensors share one
PIECES = 4  # pinned: while some are sent, the next is filled
READERS = 4  # threads that fill a piece: each waits for its own part of the file
ALIGNMENT = 512
SMALL = 1 << 20  # bytes that one thread copies as fast


class PinnedRing:
    """What is uploaded is read once, by several threads, and sent while the next is read.

    The host waits only where as many pieces as there are are still on their way.
    """

    def __init__(self, runtime: Runtime, device: torch.device) -> None:
        import torch

        self._device = device
        self._pieces = [(runtime.pinned((PIECE,), torch.uint8), runtime.event()) for _ in range(PIECES)]
        self._turn, self._used = 0, 0
        self._readers = ThreadPoolExecutor(READERS, "upload")

    def upload(self, source: Tensor) -> Tensor:
        import torch

        target = torch.empty(source.shape, dtype=source.dtype, device=self._device)
        if not source.numel():
            return target
        values, bytes_there = (t.reshape(-1).view(torch.uint8) for t in (source.contiguous(), target))
        for first in range(0, len(values), PIECE):
            part = values[first : first + PIECE]
            staged = self._room(len(part))
            self._read(part, staged)
            bytes_there[first : first + len(part)].copy_(staged, non_blocking=True)
        return target

    def _room(self, size: int) -> Tensor:
        """`size` bytes of pinned memory from which nothing is on its way."""
        piece, sent = self._pieces[self._turn]
        if self._used + size > PIECE:
            sent.record()
            self._turn, self._used = (self._turn + 1) % PIECES, 0
            piece, sent = self._pieces[self._turn]
            if not sent.query():
                sent.synchronize()
        room = piece[self._used : self._used + size]
        self._used += -(-size // ALIGNMENT) * ALIGNMENT
        return room

    def _read(self, source: Tensor, target: Tensor) -> None:
        if len(source) <= SMALL:
            target.copy_(source)
            return
        parts = zip(target.chunk(READERS), source.chunk(READERS), strict=True)
        list(self._readers.map(lambda pair: pair[0].copy_(pair[1]), parts))

    def close(self) -> None:
        self._readers.shutdown()

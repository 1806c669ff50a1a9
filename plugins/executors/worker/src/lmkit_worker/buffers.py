"""Host arrays with a device twin, seen through numpy."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lmkit.api import Buffer
    from torch import Tensor


class ArrayBuffer:
    """A Buffer with a numpy view of its host side: what input building writes to."""

    __slots__ = ("array", "buffer")

    def __init__(self, buffer: Buffer) -> None:
        self.buffer = buffer
        self.array = buffer.host.numpy()

    def push(self, n: int) -> Tensor:
        """The device side of the first `n` rows."""
        return self.buffer.push(n)

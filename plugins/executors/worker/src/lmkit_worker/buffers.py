"""Host arrays with a device twin, seen through numpy."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

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


class SteadyBuffer:
    """A Buffer whose values are mostly those of the step before: these are not sent again.

    Nothing but `push` may write to its device side.
    """

    def __init__(self, buffer: Buffer) -> None:
        self.host, self.device, self._buffer = buffer.host, buffer.device, buffer
        self._array = buffer.host.numpy()
        self._sent = np.zeros_like(self._array)
        self._num_sent = 0

    def push(self, n: int) -> Tensor:
        """As a Buffer's."""
        now = self._array[:n]
        if n <= self._num_sent and (now == self._sent[:n]).all():
            return self.device[:n]
        self._sent[:n] = now
        self._num_sent = max(self._num_sent, n)
        return self._buffer.push(n)

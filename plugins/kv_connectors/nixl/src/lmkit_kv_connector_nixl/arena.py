"""Frames in one piece of memory, which others may read without asking."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from threading import Lock
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from lmkit.api import KVKey


class Arena:
    """Contract: lmkit_stores.Store. A new frame is written behind the last one, round and round, over the oldest.

    Who reads one while it is overwritten gets a frame whose checksum is wrong, so nobody has to hold any.
    """

    def __init__(self, size: int) -> None:
        """`size` in bytes."""
        self.bytes = np.empty(size, np.uint8)
        self._at: OrderedDict[KVKey, tuple[int, int]] = OrderedDict()  # first byte and length, the oldest first
        self._next = 0
        self._lock = Lock()

    def place(self, key: KVKey) -> tuple[int, int]:
        """The address of a frame and its length; 0, 0: there is none."""
        with self._lock:
            first, size = self._at.get(key, (0, 0))
        return (self.bytes.ctypes.data + first, size) if size else (0, 0)

    def read(self, keys: Sequence[KVKey]) -> Iterator[bytes | None]:
        for key in keys:
            with self._lock:
                first, size = self._at.get(key, (0, 0))
                frame = self.bytes[first : first + size].tobytes()
            yield frame or None

    def write(self, key: KVKey, frame: bytes) -> None:
        """A frame larger than the whole is not kept."""
        num = len(frame)
        with self._lock:
            if num > len(self.bytes) or key in self._at:
                return
            if self._next + num > len(self.bytes):
                self._give_up(self._next, len(self.bytes))
                self._next = 0
            self._give_up(self._next, self._next + num)
            self.bytes[self._next : self._next + num] = np.frombuffer(frame, np.uint8)
            self._at[key] = self._next, num
            self._next += num

    def _give_up(self, begin: int, end: int) -> None:
        """The oldest, as long as they lie between these bytes."""
        while self._at:
            key, (first, size) = next(iter(self._at.items()))
            if first >= end or first + size <= begin:
                return
            del self._at[key]

    def has(self, key: KVKey) -> bool:
        return key in self._at

    def close(self) -> None:
        with self._lock:
            self._at.clear()

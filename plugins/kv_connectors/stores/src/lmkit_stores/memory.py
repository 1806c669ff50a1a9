"""Frames in memory, bounded: the least recently used are given up."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from threading import Lock
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lmkit.api import KVKey


class Memory:
    """Contract: lmkit_stores.Store."""

    def __init__(self, size: int, given_up: Callable[[KVKey, bytes], None] | None = None) -> None:
        """`size` in bytes. `given_up` gets what no longer fits, in the thread that writes."""
        self.size, self.nbytes = size, 0
        self._given_up = given_up
        self._frames: OrderedDict[KVKey, bytes] = OrderedDict()
        self._lock = Lock()

    def get(self, key: KVKey) -> bytes | None:
        with self._lock:
            frame = self._frames.get(key)
            if frame is not None:
                self._frames.move_to_end(key)
            return frame

    def read(self, keys: Sequence[KVKey]) -> Iterator[bytes | None]:
        for key in keys:
            yield self.get(key)

    def write(self, key: KVKey, frame: bytes) -> None:
        over: list[tuple[KVKey, bytes]] = []
        with self._lock:
            old = self._frames.pop(key, b"")
            self._frames[key] = frame
            self.nbytes += len(frame) - len(old)
            while self.nbytes > self.size:
                last = self._frames.popitem(last=False)
                self.nbytes -= len(last[1])
                over.append(last)
        if self._given_up is not None:
            for one in over:
                self._given_up(*one)

    def has(self, key: KVKey) -> bool:
        return key in self._frames

    def drop(self, key: KVKey) -> None:
        with self._lock:
            self.nbytes -= len(self._frames.pop(key, b""))

    def close(self) -> None:
        with self._lock:
            self._frames.clear()
            self.nbytes = 0

"""OrderedQueue: requests in the order of a key, for the waiting and the running side."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator

from lmkit.scheduling.request import Request


class OrderedQueue:
    """A sorted list. `items` may be read by index; it is changed only through the methods. Keys are unique."""

    __slots__ = ("_keys", "items")

    def __init__(self) -> None:
        self.items: list[Request] = []
        self._keys: list[tuple] = []

    def __len__(self) -> int:
        return len(self.items)

    def __iter__(self) -> Iterator[Request]:
        return iter(self.items)

    def add(self, key: tuple, r: Request) -> None:
        at = bisect_left(self._keys, key)
        self._keys.insert(at, key)
        self.items.insert(at, r)

    def remove(self, key: tuple, r: Request) -> None:
        at = bisect_left(self._keys, key)
        assert self.items[at] is r, f"request {r.id!r} is not where its key says"
        del self._keys[at], self.items[at]

    def check(self) -> None:
        assert len(self._keys) == len(self.items), "keys and items differ in number"
        assert all(a < b for a, b in zip(self._keys, self._keys[1:], strict=False)), "keys are not increasing"

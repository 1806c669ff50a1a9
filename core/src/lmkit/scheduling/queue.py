"""Requests in the order of a key, for the waiting and the running side, and the policy that gives the keys."""

from __future__ import annotations

import logging
import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence

from lmkit.api import OrderPolicy, PluginError, is_interrupt
from lmkit.scheduling.request import Request

log = logging.getLogger("lmkit.engine")


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


class Ordering:
    """A policy's answers, checked: it is a plugin, and a wrong key would mix up the queues."""

    def __init__(self, policy: OrderPolicy, owner: str = "") -> None:
        """`owner`: how errors name the plugin."""
        self._policy, self._owner = policy, owner
        self._gives_way = getattr(policy, "gives_way", None)
        self._goes_first = getattr(policy, "goes_first", None)
        self._kinds: dict[str, tuple[type, ...]] = {}  # of keys: texts or numbers, by place

    def key(self, name: str, r: Request) -> tuple:
        """What the policy answers, as a key that can be compared with all others. Raises PluginError."""
        who = f"{name} of {type(self._policy).__module__}:{type(self._policy).__qualname__}"
        who = f"{self._owner}: {who}" if self._owner else who
        try:
            key = getattr(self._policy, name)(r)
        except BaseException as e:
            if is_interrupt(e):
                raise
            log.error("%s failed", who, exc_info=e)
            raise PluginError(f"{who} failed: {type(e).__name__}") from e
        kinds = tuple(str if type(part) is str else float for part in key) if isinstance(key, tuple) else None
        if kinds is None or not all(type(part) in (str, int, bool) or _is_number(part) for part in key):
            raise PluginError(f"{who} gave {key!r:.80}, no tuple of numbers or texts")
        if self._kinds.setdefault(name, kinds) != kinds:
            raise PluginError(f"{who} gave {key!r:.80}, unlike those before")
        return (*key, r.order)

    @property
    def promotes(self) -> bool:
        """Whether the policy may name a request that goes first though others wait before it."""
        return self._goes_first is not None

    def first(self, waiting: Sequence[Request], running: Sequence[Request]) -> tuple[Request, tuple] | None:
        """The request of `waiting` that goes first in this step, with its new key; None: nobody is preferred."""
        try:
            r = self._goes_first(waiting, running) if self._goes_first is not None else None
            if r is None or r not in waiting:
                return None
            key = self.key("admit_key", r)
        except Exception as e:  # those that wait must not suffer: from now on they keep their order
            log.error("goes_first of the scheduling policy failed", exc_info=e)
            self._goes_first = None
            return None
        return r, key

    def victim(self, first: Request, running: Sequence[Request]) -> Request | None:
        """Who of `running` goes back to waiting behind `first`, with the key for that; None: nobody."""
        try:
            r = self._gives_way(first, running) if self._gives_way is not None else None
            key = self.key("admit_key", r) if r is not None and r in running else ()
        except BaseException as e:  # what runs must not suffer: from now on nobody gives way
            if is_interrupt(e):
                raise
            log.error("%s: gives_way failed", self._owner or "the scheduling policy", exc_info=e)
            self._gives_way, r, key = None, None, ()
        if r is None or key <= first.admit_key:
            return None
        r.admit_key = key
        return r


def _is_number(part: object) -> bool:
    return isinstance(part, int | float) and not math.isnan(part)

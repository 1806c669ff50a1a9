"""Answers that are kept for a while, in memory: those of one tenant are nobody else's, and each has its bounds."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from threading import Lock

from lmkit.api import RequestError

MAX_KEPT = 1024  # answers of a tenant
MAX_BYTES = 64 << 20  # of a tenant's answers and what was asked, as JSON


class NotKept(RequestError):
    """There is no such answer: it never was, was not to be kept, was deleted, or had to make room."""

    code = "not_found"
    status = 404

    def __init__(self, id: str) -> None:
        fix = "the oldest make room for others, and with store=false none is kept"
        super().__init__(f"no answer {id[:100]!r} is kept here", fix=fix)


class NotFound(NotKept):
    """A body names it."""

    status = 400

    def __init__(self, id: str, field: str) -> None:
        super().__init__(id)
        self.field = field


class PreviousNotFound(NotFound):
    code = "previous_response_not_found"


@dataclass(frozen=True)
class Kept:
    """One answer, and what was asked beside the items of those before it."""

    id: str
    previous: str | None  # the answer that it followed
    input: bytes  # a JSON list of items, each with an id
    body: bytes  # the answer

    @property
    def size(self) -> int:
        return len(self.input) + len(self.body)


class Store:
    """May be used by several threads at once. What was used last is kept longest."""

    def __init__(self, max_kept: int = MAX_KEPT, max_bytes: int = MAX_BYTES) -> None:
        self._max_kept, self._max_bytes = max_kept, max_bytes
        self._kept: dict[str, OrderedDict[str, Kept]] = {}  # by tenant; first what was used longest ago
        self._sizes: dict[str, int] = {}  # bytes by tenant
        self._lock = Lock()

    def put(self, tenant: str, kept: Kept) -> None:
        """The oldest make room, an answer that is larger than all may be among them."""
        with self._lock:
            those = self._kept.setdefault(tenant, OrderedDict())
            those[kept.id] = kept
            self._sizes[tenant] = self._sizes.get(tenant, 0) + kept.size
            while len(those) > self._max_kept or self._sizes[tenant] > self._max_bytes:
                _, gone = those.popitem(last=False)
                self._sizes[tenant] -= gone.size

    def get(self, tenant: str, id: str) -> Kept:
        """Raises NotKept."""
        with self._lock:
            if id not in self._kept.get(tenant, {}):
                raise NotKept(id)
            self._kept[tenant].move_to_end(id)
            return self._kept[tenant][id]

    def delete(self, tenant: str, id: str) -> None:
        """Raises NotKept."""
        with self._lock:
            if id not in self._kept.get(tenant, {}):
                raise NotKept(id)
            self._sizes[tenant] -= self._kept[tenant].pop(id).size

    def chain(self, tenant: str, id: str | None) -> list[Kept]:
        """The answer with all that it followed, the first one first. Raises NotKept."""
        found: list[Kept] = []
        while id is not None:
            found.append(self.get(tenant, id))
            id = found[-1].previous
        return found[::-1]

    def check(self) -> None:
        """Raises AssertionError when counts are wrong or bounds exceeded."""
        with self._lock:
            for tenant, those in self._kept.items():
                assert len(those) <= self._max_kept
                assert self._sizes[tenant] == sum(kept.size for kept in those.values()) <= self._max_bytes

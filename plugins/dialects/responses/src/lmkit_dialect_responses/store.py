"""Answers that are kept for a while, in memory: those of one tenant are nobody else's, and each has its bounds."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace
from threading import Lock

import msgspec
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


UNFINISHED = ("queued", "in_progress")


class Unfinished(RequestError):
    """It goes on in the background."""

    code = "response_not_finished"
    field = "previous_response_id"

    def __init__(self, id: str) -> None:
        super().__init__(f"the answer {id[:100]!r} is not finished", fix="wait until it is")


class Status(msgspec.Struct, frozen=True):
    """What of a kept answer says how far it is."""

    status: str
    background: bool = False
    created_at: int = 0  # seconds since 1970


def progress(kept: Kept) -> Status:
    return msgspec.json.decode(kept.body, type=Status)


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
            self._put(tenant, kept)

    def _put(self, tenant: str, kept: Kept) -> None:
        those = self._kept.setdefault(tenant, OrderedDict())
        before = those.pop(kept.id, None)
        those[kept.id] = kept
        self._sizes[tenant] = self._sizes.get(tenant, 0) + kept.size - (before.size if before is not None else 0)
        while len(those) > self._max_kept or self._sizes[tenant] > self._max_bytes:
            _, gone = those.popitem(last=False)
            self._sizes[tenant] -= gone.size

    def replace(self, tenant: str, id: str, body: Callable[[Kept], bytes]) -> None:
        """The body of an answer that goes on; one that is not kept any more does not come back."""
        with self._lock:
            those = self._kept.get(tenant)
            if those is not None and id in those:
                self._put(tenant, replace(those[id], body=body(those[id])))

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

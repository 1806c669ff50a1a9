"""Memory of running answers: what clients have not read yet, and what whole answers hold until they are sent.

The engine does not wait for readers, and a whole answer is kept until its last token: both are bounded, each answer
and all of them together. The part that is known beforehand (log-probabilities of prompts, vectors) is reserved.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Collection
from typing import Protocol

from lmkit.api import EngineBusy, ErrorInfo

from lmkit_http.admission import RateLimited

MAX_BACKLOG = 32 << 20  # bytes of one answer that nobody has read
MAX_TOGETHER = 256 << 20  # of all
MAX_HELD = 512 << 20  # bytes that all running answers take together
_LOOK = 0.5  # seconds
_TOO_SLOW = ErrorInfo(
    "slow-client", "the answer was not read as fast as it was made", "read it faster, or ask for less", status=408
)
_NO_MEMORY = ErrorInfo(
    "answer-memory", "the running answers take too much memory together, and this is the largest",
    "ask for fewer log-probabilities, choices or tokens at once", status=503, retryable=True,
)  # fmt: skip


class Answer(Protocol):
    @property
    def tenant(self) -> str: ...

    @property
    def backlog(self) -> int:
        """Bytes that wait to be sent, roughly; 0 once it has failed."""
        ...

    @property
    def held(self) -> int:
        """Bytes of memory that it takes or has reserved, roughly; 0 once it has failed."""
        ...

    def fail(self, error: ErrorInfo) -> None: ...


class Backlogs:
    """Looks at the running answers from time to time, and ends those that take too much."""

    def __init__(self, running: Collection[Answer]) -> None:
        self._running = running
        self._next: asyncio.TimerHandle | None = None

    def watch(self) -> None:
        """As long as something runs. Idempotent."""
        if self._next is None and self._running:
            self._next = asyncio.get_running_loop().call_later(_LOOK, self._look)

    def check_room(self, tenant: str, num_bytes: int, several: bool) -> None:
        """Raises EngineBusy when an answer of so many bytes has no room beside those that run, and RateLimited when
        `several` keys share the room and this one would have more than half of it."""
        if not num_bytes:
            return
        sizes = [(answer.tenant, answer.held) for answer in self._running]
        total, own = sum(size for _, size in sizes), sum(size for key, size in sizes if key == tenant)
        fix = "try again in a while, or ask for fewer log-probabilities"
        if total + num_bytes > MAX_HELD:
            raise EngineBusy(f"the running answers take {_mib(total)}, the limit is {_mib(MAX_HELD)}", fix=fix)
        if several and own + num_bytes > MAX_HELD // 2:
            raise RateLimited(f"answers of this key take {_mib(own)}, its limit is {_mib(MAX_HELD // 2)}", 1.0)

    def _look(self) -> None:
        self._next = None
        unread = sorted(((a.backlog, i, a) for i, a in enumerate(self._running)), reverse=True)
        together = sum(size for size, _, _ in unread)
        for size, _, answer in unread:
            if size <= MAX_BACKLOG and together <= MAX_TOGETHER:
                break
            answer.fail(_TOO_SLOW)
            together -= size
        self._bound_held()
        self.watch()

    def _bound_held(self) -> None:
        """While all take too much together, the largest answer of the key that takes most is ended."""
        sizes = [(answer, answer.held) for answer in self._running]
        by_tenant = Counter[str]()
        for answer, size in sizes:
            by_tenant[answer.tenant] += size
        while by_tenant.total() > MAX_HELD:
            tenant = max(by_tenant, key=lambda name: by_tenant[name])
            largest = max((item for item in sizes if item[0].tenant == tenant), key=lambda item: item[1])
            sizes.remove(largest)
            largest[0].fail(_NO_MEMORY)
            by_tenant[tenant] -= largest[1]


def _mib(num_bytes: int) -> str:
    return f"{num_bytes >> 20} MiB"

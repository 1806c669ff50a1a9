"""Answers that came and that clients have not read yet: the engine does not wait for readers, so they are bounded."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from typing import Protocol

from lmkit.api import ErrorInfo

MAX_BACKLOG = 32 << 20  # bytes of one answer
MAX_TOGETHER = 256 << 20  # of all
_LOOK = 0.5  # seconds
_TOO_SLOW = ErrorInfo(
    "slow-client", "the answer was not read as fast as it was made", "read it faster, or ask for less", status=408
)


class Answer(Protocol):
    @property
    def backlog(self) -> int:
        """Bytes that wait to be sent, roughly; 0 once it has failed."""
        ...

    def fail(self, error: ErrorInfo) -> None: ...


class Backlogs:
    """Looks at the running answers from time to time, and ends those of readers that are too slow."""

    def __init__(self, running: Collection[Answer]) -> None:
        self._running = running
        self._next: asyncio.TimerHandle | None = None

    def watch(self) -> None:
        """As long as something runs. Idempotent."""
        if self._next is None and self._running:
            self._next = asyncio.get_running_loop().call_later(_LOOK, self._look)

    def _look(self) -> None:
        self._next = None
        found = sorted(((a.backlog, i, a) for i, a in enumerate(self._running)), reverse=True)
        together = sum(size for size, _, _ in found)
        for size, _, answer in found:
            if size <= MAX_BACKLOG and together <= MAX_TOGETHER:
                break
            answer.fail(_TOO_SLOW)
            together -= size
        self.watch()

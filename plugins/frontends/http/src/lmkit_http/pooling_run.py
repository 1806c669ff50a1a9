"""A call of a pooling model that is being answered."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

from lmkit.api import ErrorInfo
from lmkit.front.ask import PoolAsk, ScoreAsk
from lmkit.front.run import GenerationFailed, pool
from lmkit.text.pooling import Call, Vector

if TYPE_CHECKING:
    from lmkit_http.backend import Backend


class PoolingRun:
    """`fail` ends it from this side."""

    backlog = 0  # its answer is one

    def __init__(self, backend: Backend, call: Call[Any], id: str, ask: PoolAsk | ScoreAsk, salt: str | None) -> None:
        self._backend, self.call, self._id = backend, call, id
        self._how: dict[str, Any] = {"priority": ask.priority, "adapter": ask.adapter, "salt": salt}
        self._error: ErrorInfo | None = None
        self._task: asyncio.Task[list[Vector]] | None = None

    @property
    def num_tokens(self) -> int:
        return sum(len(r.token_ids) for r in self.call.requests)

    async def vectors(self) -> list[Vector]:
        """Raises what the engine says, or what `fail` was told."""
        began = time.monotonic()
        work = pool(self._backend.client, self.call, id=self._id, **self._how)
        self._task = asyncio.ensure_future(work)
        try:
            found = await self._task
        except asyncio.CancelledError:
            self._task.cancel()
            if self._error is None:
                raise
            raise GenerationFailed(self._error) from None
        self._backend.metrics.pooled(len(found), self.num_tokens, time.monotonic() - began)
        return found

    def fail(self, error: ErrorInfo) -> None:
        self._error = error
        if self._task is not None:
            self._task.cancel()

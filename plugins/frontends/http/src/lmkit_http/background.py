"""What dialects do beside answering: their work, and answers to it behind everything that clients wait for."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from lmkit.api import EngineBusy, EngineDead, is_interrupt

from lmkit_http.access import Caller
from lmkit_http.answering import prepared, whole
from lmkit_http.dialect import Answer, Dialect, Incoming, UnsupportedField
from lmkit_http.dialects import blamed, speaker
from lmkit_http.error_bodies import written_error
from lmkit_http.errors import info_of, public

if TYPE_CHECKING:
    from lmkit_http.backend import Backend

LAST = 1 << 31  # the priority behind all that clients may ask for
_PAUSE = 0.05  # seconds between looks whether there is room
_ROWS = 16  # where the engine does not say
_LEFT = 8  # the share of the rows, one by so many, that the background leaves to clients
_TRIES = 3  # of a request whose engine died
log = logging.getLogger("lmkit.server")


class Background:
    """Used as `async with`: the dialects work in it. `answer` may be used without."""

    def __init__(self, backend: Backend, dialects: Sequence[Dialect], at_once: int | None = None) -> None:
        """`at_once`: how many requests are answered at a time; None: an eighth of the rows is left to clients."""
        self._backend, self._dialects = backend, dialects
        rows = backend.facts.max_rows or _ROWS
        self._few = asyncio.Semaphore(at_once or max(1, rows - max(1, rows // _LEFT)))
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> None:
        workers = [dialect for dialect in self._dialects if type(dialect).work is not Dialect.work]
        self._tasks = [asyncio.create_task(self._work(dialect)) for dialect in workers]

    async def __aexit__(self, *exc: object) -> None:
        await self.stop()

    async def stop(self) -> None:
        """Idempotent. What was under way is given up: what must not be lost the dialects have written down."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _work(self, dialect: Dialect) -> None:
        try:
            await dialect.work(self.answer)
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # a plugin may raise SystemExit, too
            if is_interrupt(error):
                raise
            log.error("%s: the work beside its answers has ended", dialect.owner, exc_info=error)

    async def answer(self, incoming: Incoming) -> Answer:
        """What whoever speaks the route says; an error is an answer, too. Waits until there is room for it.

        A request that an engine died with is tried again, a few times.
        """
        dialect: Dialect | None = None
        deaths = 0
        while True:
            try:
                dialect = speaker(self._dialects, incoming.route)
                async with self._few:
                    await self._room()
                    return await self._answer(dialect, incoming)
            except asyncio.CancelledError:
                raise
            except BaseException as error:  # a plugin may raise SystemExit, too
                e = error if dialect is None else blamed(error, dialect, self._backend)
                info = info_of(e)
                deaths += info.code == EngineDead.code
                if info.code in (EngineBusy.code, EngineDead.code) and deaths < _TRIES:
                    await asyncio.sleep(_PAUSE)
                    continue
                if info.status >= 500:
                    log.error("a request in the background failed", exc_info=e)
                return Answer(written_error(dialect, public(info)), info.status)

    async def _room(self) -> None:
        while True:
            try:
                return self._backend.check_room()
            except (EngineBusy, EngineDead):
                await asyncio.sleep(_PAUSE)

    async def _answer(self, dialect: Dialect, incoming: Incoming) -> Answer:
        backend, caller = self._backend, Caller(False, False, incoming.tenant)
        backend.num_preparing += 1
        try:
            size = len(incoming.body)
            _, found = await backend.workers.run(size, prepared, backend, self._dialects, dialect, incoming, caller)
            if isinstance(found, Answer):
                return found
            exchange, generation = found
            if exchange.streamed:
                raise UnsupportedField("stream", "nobody reads a stream here", fix="leave stream out")
            backend.backlogs.check_room(incoming.tenant, generation.reserved, several=False)
            for turn in generation.turns:
                turn.request.priority = LAST
            backend.begin(exchange, generation, incoming.route, incoming.tenant, incoming.headers)
        finally:
            backend.prepared()
        try:
            content = await whole(backend, exchange, generation)
        finally:
            backend.end(generation)
        return Answer(content, 200, exchange.media_type, exchange.headers)


__all__ = ["LAST", "Background"]

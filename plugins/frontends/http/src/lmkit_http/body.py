"""Request bodies: bounded each, and all that are in memory together."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from lmkit.api import EngineBusy
from starlette.requests import Request

from lmkit_http.counts import BYTES, Counts
from lmkit_http.encoding import decoder
from lmkit_http.errors import HttpError

BODY_SECONDS = 60.0
FREE = 64 << 10  # bytes of each body that count for nothing: ordinary requests never wait for large ones


class Bodies:
    """Bodies in memory, of all connections."""

    def __init__(self, limit: int, limit_together: int, counts: Counts | None = None) -> None:
        """Bytes of one body, and of all; `counts`: of all processes."""
        self._limit, self._together, self._counts = limit, max(limit, limit_together), counts
        self.num_bytes = 0  # of this process

    @asynccontextmanager
    async def read(self, request: Request) -> AsyncIterator[bytearray]:
        """The body, whose bytes count until the end of the block.

        Raises HttpError 413, whatever Content-Length said, and 408 for a client that does not get on; EngineBusy;
        BrokenEncoding.
        """
        body = bytearray()
        try:
            async with asyncio.timeout(BODY_SECONDS):
                await self._fill(body, request)
        except TimeoutError:
            self._forget(body)
            raise HttpError(408, "body-timeout", f"the body did not arrive within {BODY_SECONDS:g} s") from None
        except BaseException:
            self._forget(body)
            raise
        try:
            yield body
        finally:
            self._forget(body)

    async def _fill(self, body: bytearray, request: Request) -> None:
        plain = decoder(request.headers.get("content-encoding", ""))
        async for sent in request.stream():
            for part in plain.feed(sent):
                self._take(body, part)
                if part is not sent:
                    await asyncio.sleep(0)  # others meanwhile: little that was sent may be much
        plain.end()

    def _take(self, body: bytearray, part: bytes) -> None:
        if len(body) + len(part) > self._limit:
            raise HttpError(413, "body-too-large", f"the body is larger than {self._limit} bytes")
        more = _counted(len(body) + len(part)) - _counted(len(body))
        if more and self._total() + more > self._together:
            raise EngineBusy("too many large requests are being read", fix="try again in a while")
        self._add(more)
        body += part

    def _forget(self, body: bytearray) -> None:
        self._add(-_counted(len(body)))

    def _total(self) -> int:
        return self.num_bytes if self._counts is None else self._counts.total(BYTES)

    def _add(self, num: int) -> None:
        if num:
            self.num_bytes += num
            if self._counts is not None:
                self._counts.put(BYTES, self.num_bytes)


def _counted(size: int) -> int:
    return max(0, size - FREE)

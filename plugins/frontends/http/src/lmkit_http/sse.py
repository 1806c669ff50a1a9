"""Answers that watch their client: server-sent events, and whole answers that stop when nobody waits for them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any, TypeVar

from starlette.types import Receive, Scope, Send

from lmkit_http.dialect import Dialect
from lmkit_http.errors import error_response, info_of, public

T = TypeVar("T")
FIRST_WAIT = 1.0  # seconds in which an error before the first event still gets its own HTTP status


class ClientGone(Exception):
    """The client closed the connection."""


async def gone(receive: Receive) -> None:
    """Returns when the client has disconnected. The body must have been read before."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def while_connected(receive: Receive, work: Awaitable[T]) -> T:
    """`work`'s result; cancels it and raises ClientGone when the client leaves first."""
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(gone(receive))
    try:
        await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGone
    finally:
        for t in (task, watch):
            if not t.done():
                t.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)
        del task, watch, t  # an error of theirs holds this frame, and with it all that is large


class EventResponse:
    """Sends `chunks` as they come. `close` is called exactly once, with the status, also when the client leaves in the
    middle."""

    def __init__(
        self,
        chunks: AsyncIterator[bytes],
        close: Callable[[int], None],
        log: Callable[[BaseException], None],
        dialect: Dialect,
        headers: Mapping[str, str],
    ) -> None:
        self._chunks, self._close, self._log, self._dialect = chunks, close, log, dialect
        self._more_headers = headers
        self.status_code = 200

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await while_connected(receive, self._run(scope, receive, send))
        except (ClientGone, OSError):
            pass
        finally:
            self._close(self.status_code)

    async def _run(self, scope: Scope, receive: Receive, send: Send) -> None:
        chunks = self._chunks
        first = asyncio.ensure_future(anext(chunks, b""))
        try:
            await asyncio.wait((first,), timeout=FIRST_WAIT)
            if first.done() and (error := first.exception()) is not None:
                await self._refuse(error, scope, receive, send)
                return
            await send({"type": "http.response.start", "status": 200, "headers": self._headers()})
            try:
                await send(_body(await first))
                async for chunk in chunks:
                    await send(_body(chunk))
            except OSError:
                raise
            except Exception as error:
                self._log(error)
                await send(_body(self._dialect.error_chunk(public(info_of(error)))))
            await send({"type": "http.response.body", "body": self._dialect.stream_end, "more_body": False})
        finally:
            first.cancel()

    def _headers(self) -> list[tuple[bytes, bytes]]:
        kind = self._dialect.stream_type.encode()
        more = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in self._more_headers.items()]
        return [(b"content-type", kind), (b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no"), *more]

    async def _refuse(self, error: BaseException, scope: Scope, receive: Receive, send: Send) -> None:
        self._log(error)
        response = error_response(info_of(error), self._dialect.error)
        self.status_code = response.status_code
        await response(scope, receive, send)


def _body(data: bytes) -> dict[str, Any]:
    return {"type": "http.response.body", "body": data, "more_body": True}

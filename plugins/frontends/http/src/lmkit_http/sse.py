"""Answers that watch their client: server-sent events, and whole answers that stop when nobody waits for them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

from starlette.types import Message, Receive, Scope, Send

from lmkit_http.dialect import Dialect
from lmkit_http.error_bodies import written_error, written_error_chunk
from lmkit_http.errors import error_response, info_of, public

T = TypeVar("T")
FIRST_WAIT = 1.0  # seconds in which an error before the first event still gets its own HTTP status
SILENCE = 8.0  # seconds without a chunk after which a stream says that it waits; proxies cut silence of 60 s


class ClientGone(Exception):
    """The client closed the connection."""


async def gone(receive: Receive) -> None:
    """Returns when the client has disconnected. The body must have been read before."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def while_connected(receive: Receive, work: Awaitable[T]) -> T:
    """`work`'s result; cancels it and raises ClientGone when the client leaves first.

    It is awaited here, and not as a task: each task between an answer and its socket is one more turn of the event
    loop to wait for, which are long when many come and are refused.
    """
    working, left = asyncio.current_task(), False
    assert working is not None

    async def look() -> None:
        nonlocal left
        await gone(receive)
        left = True
        working.cancel()

    watch = asyncio.ensure_future(look())
    try:
        return await work
    except asyncio.CancelledError:
        if left and not working.uncancel():
            raise ClientGone from None
        raise
    finally:
        watch.cancel()


class _Head:
    """The beginning of an answer, which is sent once: before the first chunk, or by a timer where that takes long."""

    def __init__(self, send: Send, message: Message) -> None:
        self._send, self._message = send, message
        self._early: asyncio.Future[None] | None = None  # being sent by the timer
        self.begun = False
        self._complete = False  # it has been sent

    @property
    def may_be_followed(self) -> bool:
        """Whether somebody who awaits `sent` may send what comes behind it."""
        return self._complete or self._early is not None

    def begin(self) -> None:
        if not self.begun:
            self.begun, self._early = True, asyncio.ensure_future(self._send(self._message))

    async def sent(self) -> None:
        """Returns when it has been."""
        if not self.begun:
            self.begun = True
            await self._send(self._message)
            self._complete = True
        elif self._early is not None:
            await asyncio.shield(self._early)  # others may wait for it, too
            self._early, self._complete = None, True

    def cancel(self) -> None:
        if self._early is not None:
            self._early.cancel()


class _Pauses:
    """While no chunk comes, something that no parser sees is sent from time to time, once the head has been sent."""

    def __init__(self, send: Send, head: _Head, waiting: bytes) -> None:
        self._send, self._head, self._waiting = send, head, waiting
        self._loop = asyncio.get_running_loop()
        self._at = self._loop.time()  # of the last chunk
        self._whole = True  # no chunk was sent yet, or the last one ended with its line
        self._sending: asyncio.Future[None] | None = None
        self._timer = self._loop.call_later(SILENCE, self._look) if waiting else None

    def chunk(self, chunk: bytes) -> None:
        """A chunk is about to be sent."""
        self._at, self._whole = self._loop.time(), chunk.endswith(b"\n")

    def _look(self) -> None:
        now = self._loop.time()
        if now - self._at >= SILENCE:
            self._at = now
            if self._whole and self._head.may_be_followed and (self._sending is None or self._sending.done()):
                self._sending = asyncio.ensure_future(self._say())
        self._timer = self._loop.call_at(self._at + SILENCE, self._look)

    async def _say(self) -> None:
        with suppress(OSError):  # the client left, which is seen elsewhere
            await self._head.sent()
            await self._send(_body(self._waiting))

    def cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._sending is not None:
            self._sending.cancel()


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
        head = _Head(send, {"type": "http.response.start", "status": 200, "headers": self._headers()})
        timer = asyncio.get_running_loop().call_later(FIRST_WAIT, head.begin)
        pauses = _Pauses(send, head, self._dialect.waiting())
        try:
            async for chunk in self._chunks:
                pauses.chunk(chunk)
                await head.sent()
                await send(_body(chunk))
            await head.sent()
        except OSError:
            raise
        except Exception as error:
            if not head.begun:
                await self._refuse(error, scope, receive, send)
                return
            self._log(error)
            await head.sent()
            await send(_body(written_error_chunk(self._dialect, public(info_of(error)))))
        finally:
            timer.cancel()
            pauses.cancel()
            head.cancel()
        await send({"type": "http.response.body", "body": self._dialect.stream_end, "more_body": False})

    def _headers(self) -> list[tuple[bytes, bytes]]:
        kind = self._dialect.stream_type.encode()
        more = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in self._more_headers.items()]
        return [(b"content-type", kind), (b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no"), *more]

    async def _refuse(self, error: BaseException, scope: Scope, receive: Receive, send: Send) -> None:
        self._log(error)
        response = error_response(info_of(error), partial(written_error, self._dialect))
        self.status_code = response.status_code
        await response(scope, receive, send)


def _body(data: bytes) -> dict[str, Any]:
    return {"type": "http.response.body", "body": data, "more_body": True}

"""HTTP/1.1 on a socket: uvicorn's httptools protocol with bounds on everything that is not a body.

The parser itself collects headers and trailers without end, parses every request of a pipeline at once, and waits for
slow readers for ever; the Gate only sees complete headers.
"""

from __future__ import annotations

from asyncio import Transport
from collections.abc import Iterable
from functools import partial
from typing import Any

import httptools
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from lmkit_http.door import Door

HEAD_SECONDS = 30.0  # from the first byte (or the connection) to the end of the headers
WRITE_SECONDS = 30.0  # that a client may take to read what was sent, before more can be
LINGER_SECONDS = 2.0  # in which what comes after a refusal is thrown away, so that the client gets to read it
_REST = 64 << 10  # bytes of a body that are read and thrown away after a refusal; of a longer one the connection ends
_SLICE = 16 << 10  # bytes that the parser sees at a time: bounds the requests that are made at once
_HELD = 64 << 10  # bytes that may wait for the answers to requests before them; then nothing is read any more
_MOST_HELD = 1 << 20
_CHUNK_HEAD = 20  # bytes of a chunk's size and line ends


class _Refused:
    """Stands for the exchange of a request that was answered at the door, while its body comes."""

    response_complete = True

    def __init__(self) -> None:
        self.more_body = True
        self.message_event = _Nobody()


class _Nobody:
    """The event that nobody waits for."""

    def set(self) -> None:
        pass


class BoundedProtocol(HttpToolsProtocol):
    """The limit of headers in bytes is the configuration's `h11_max_incomplete_event_size`."""

    def __init__(self, *args: Any, door: Door | None = None, **options: Any) -> None:
        """`door`: answers what has no room, without the application."""
        super().__init__(*args, **options)
        self._door = door

    def connection_made(self, transport: Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._limit = (self.config.h11_max_incomplete_event_size or 1 << 16) + _SLICE
        self._overhead = 0  # bytes of this request that are not its body
        self._in_head = True
        self._held = b""
        self._refused = False  # nothing that comes is read any more
        self._slow = self.loop.call_later(HEAD_SECONDS, transport.close)
        self._unread = self._slow

    def connection_lost(self, exc: Exception | None) -> None:
        self._slow.cancel()
        self._unread.cancel()
        self._held = b""
        super().connection_lost(exc)

    # -- reading

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        if self._held or self.pipeline:
            self._hold(data)
        else:
            self._feed(data)

    def _feed(self, data: bytes) -> None:
        for at in range(0, len(data), _SLICE):
            piece = data[at : at + _SLICE]
            self._overhead += len(piece)
            super().data_received(piece)
            if self.transport.is_closing():
                return
            if self._overhead > self._limit:
                self.send_400_response("The headers are too large.")
                return
            self._overhead = max(0, self._overhead)
            if self.pipeline:
                self._hold(data[at + _SLICE :])
                return

    def _hold(self, data: bytes) -> None:
        """Keeps what follows requests that wait for the answer to another."""
        self._held += data
        if len(self._held) > _MOST_HELD:
            self.transport.abort()
        else:
            self._pause_if_full()

    def _pause_if_full(self) -> None:
        """Not sooner: who does not read does not see that the client has left."""
        if len(self._held) > _HELD:
            self.flow.pause_reading()

    def on_message_begin(self) -> None:
        self._unset_keepalive_if_required()  # it may have been set by the end of a refused request, in the same bytes
        self._in_head, self._overhead = True, 0
        self._wait_for_head()
        super().on_message_begin()

    def _wait_for_head(self) -> None:
        self._slow.cancel()
        self._slow = self.loop.call_later(HEAD_SECONDS, self._end_slow_head)

    def _end_slow_head(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            self._wait_for_head()  # of the next request, while this one is being answered
        else:
            self.transport.close()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:  # else a trailer, in which nobody is interested
            super().on_header(name, value)

    def on_headers_complete(self) -> Any:
        self._in_head = False
        self._check_target()
        if self._door is not None and self._is_plain() and self._refuse_at_door(self._door):
            return None
        self._slow.cancel()
        return super().on_headers_complete()

    def _is_plain(self) -> bool:
        """Whether an answer may be written now, and nothing follows but a small body that is on its way."""
        parser = self.parser
        return (
            (self.cycle is None or self.cycle.response_complete)
            and not (self.flow.write_paused or self.expect_100_continue or parser.should_upgrade())
            and parser.get_http_version() == "1.1" and parser.should_keep_alive()
            and parser.get_method() == b"POST" and _is_small(self.headers)
        )  # fmt: skip

    def _refuse_at_door(self, door: Door) -> bool:
        """Whether the request has been refused. What comes of it is thrown away."""
        target = self.url.partition(b"?")[0]
        if b"%" in target or not target.startswith(b"/"):
            return False
        answer = door.refusal(target.decode("ascii"), self.headers)
        if answer is None:
            return False
        head, body = answer
        more = b"".join(b"%b: %b\r\n" % header for header in self.server_state.default_headers)
        self.transport.write(b"%b%b\r\n%b" % (head, more, body))
        self.server_state.total_requests += 1
        self.cycle = _Refused()  # type: ignore[assignment]
        return True

    def _check_target(self) -> None:
        """A target may name a host too: the one that everything behind looks at. Raises ValueError."""
        if self.url.startswith(b"/"):
            return
        host = httptools.parse_url(self.url).host
        if host is not None and any(n == b"host" and _host_of(v) != host.lower() for n, v in self.headers):
            raise ValueError("the target and the Host header name different hosts")

    def on_chunk_header(self) -> None:
        self._overhead -= _CHUNK_HEAD

    def on_body(self, body: bytes) -> None:
        self._overhead -= len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        super().on_message_complete()
        if self.cycle.response_complete and self.cycle.more_body:  # the rest of a request that was refused
            self.cycle.more_body = False
            self._slow.cancel()
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    # -- writing

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGIApp) -> None:  # type: ignore[override]
        super()._start_asgi_task(cycle, partial(self._answer, cycle, app))

    async def _answer(
        self, cycle: RequestResponseCycle, app: ASGIApp, scope: Scope, receive: Receive, send: Send
    ) -> None:
        """Runs the application. An answer that comes before the body says whether the connection goes on: who sends the
        next request on one that ends may not know whether it was taken."""

        async def say(message: Message) -> None:
            if self.transport.is_closing():  # aborted, which the exchange learns a moment later
                cycle.disconnected = True
            if not cycle.response_started and cycle.more_body and not self._is_short(cycle):
                self._refused = True
                message = {**message, "headers": [*message.get("headers", ()), (b"connection", b"close")]}
                await send(message)
                cycle.keep_alive = True  # it is closed here, not at once: that would reset it before it is read
            else:
                await send(message)

        await app(scope, receive, say)

    def _is_short(self, cycle: RequestResponseCycle) -> bool:
        """Whether the rest of a body is known to be small, and on its way."""
        return _is_small(cycle.scope["headers"]) and cycle.keep_alive and not cycle.waiting_for_100_continue

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.is_closing():
            return
        if self._refused:
            self._refuse_rest()
        elif self.cycle.response_complete and self.cycle.more_body:
            self._wait_for_head()  # the rest of this request has as much time
        elif self._held and not self.pipeline:
            held, self._held = self._held, b""
            self._feed(held)
        self._pause_if_full()

    def _refuse_rest(self) -> None:
        """The request was answered without its body. A close now would reset the connection before that is read."""
        self._held = b""
        self._unset_keepalive_if_required()
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._slow.cancel()
        self._slow = self.loop.call_later(LINGER_SECONDS, self.transport.abort)

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self._wait_for_reader()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._wait_for_reader()

    def resume_writing(self) -> None:
        self._unread.cancel()
        super().resume_writing()

    def _wait_for_reader(self) -> None:
        self._unread.cancel()
        self._unread = self.loop.call_later(WRITE_SECONDS, self.transport.abort)


def _is_small(headers: Iterable[tuple[bytes, bytes]]) -> bool:
    sizes = [value for name, value in headers if name == b"content-length"]
    return len(sizes) == 1 and sizes[0].isdigit() and int(sizes[0][:20]) <= _REST


def _host_of(header: bytes) -> bytes:
    host = header.strip().lower()
    return host[1:].partition(b"]")[0] if host.startswith(b"[") else host.partition(b":")[0]

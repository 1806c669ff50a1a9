"""HTTP/1.1 on a socket: uvicorn's httptools protocol with a bound on what comes before the body, in bytes and seconds.

The parser itself collects headers without end; the Gate only sees them when they are complete.
"""

from __future__ import annotations

from asyncio import Transport
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

HEAD_SECONDS = 30.0  # from the first byte (or the connection) to the end of the headers
_ONE_READ = 256 << 10  # the first bytes of a body may arrive with the headers


class BoundedProtocol(HttpToolsProtocol):
    """The limit in bytes is the configuration's `h11_max_incomplete_event_size`."""

    def connection_made(self, transport: Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._limit = (self.config.h11_max_incomplete_event_size or 1 << 16) + _ONE_READ
        self._head_bytes = 0
        self._in_head = True
        self._slow = self.loop.call_later(HEAD_SECONDS, transport.close)

    def connection_lost(self, exc: Exception | None) -> None:
        self._slow.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._in_head:
            self._head_bytes += len(data)
            if self._head_bytes > self._limit:
                self.send_400_response("The headers are too large.")
                return
        super().data_received(data)

    def on_message_begin(self) -> None:
        self._in_head, self._head_bytes = True, 0
        self._slow.cancel()
        self._slow = self.loop.call_later(HEAD_SECONDS, self.transport.close)
        super().on_message_begin()

    def on_headers_complete(self) -> Any:
        self._in_head = False
        self._slow.cancel()
        return super().on_headers_complete()

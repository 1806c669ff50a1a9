"""With `--api-workers` several processes answer; what one request may leave for the next is answered by the first one.

An API process answers itself what it can answer as any other would: dialects that keep nothing, and the routes of
LOCAL. All else, paths that nobody knows too, it hands on as it came, over a socket in a folder of the server's own.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import httpx
from lmkit.api import EngineBusy, ErrorInfo
from starlette.types import Message, Receive, Scope, Send

from lmkit_http.access import tenants
from lmkit_http.counts import Counts
from lmkit_http.dialect import Dialect, Incoming, Served
from lmkit_http.errors import HttpError, error_response
from lmkit_http.settings import ServerSettings
from lmkit_http.sse import ClientGone, while_connected

DOOR, COUNTS, METRICS = "door", "counts", "metrics"  # in the folder that the processes share
LOCAL = frozenset({
    "/", "/v1/models", "/v1/models/{name:path}", "/tokenize", "/detokenize", "/live", "/version", "/tokenizer_info",
})  # fmt: skip
_HOP = frozenset({  # of this connection, or of each answer
    b"connection", b"keep-alive", b"transfer-encoding", b"upgrade", b"te", b"trailer", b"expect", b"date",
})  # fmt: skip
_BODY = frozenset({b"content-length", b"transfer-encoding"})
_PLAIN = "/:@!$&'()*+,;=~"  # of a path
_IDLE = 2.0  # seconds: the first process waits longer before it closes a connection


@dataclass(frozen=True)
class Part:
    """What a process knows of the server that it is a part of: `place` 0 is the first one, which has the engine."""

    folder: Path
    counts: Counts
    created: int  # when the model was, as routes tell it
    place: int = 0
    hand: Hand | None = None  # None: it is the first one

    @property
    def metrics(self) -> Path | None:
        """Where the others' are; only the first one tells them."""
        return self.folder / METRICS if not self.place else None


def counts_of(folder: Path, settings: ServerSettings, place: int = 0) -> Counts:
    return Counts(folder / COUNTS, tenants(settings), settings.api_workers + 1, place)


class Elsewhere(Dialect):
    """Stands for a dialect whose requests all go to the first process."""

    def __init__(self, kind: type[Dialect]) -> None:
        self.routes, self.light_routes, self.mark = (), kind.routes + kind.light_routes, kind.mark  # type: ignore[misc]
        self._kind = kind

    def parse(self, incoming: Incoming, served: Served) -> Incoming:
        raise HttpError(
            501, "elsewhere", f"{incoming.route} is answered by another process, and was handed on within this one",
            fix="the dialect that hands on must not declare `keeps = False`; meanwhile: --api-workers 1",
        )  # fmt: skip

    def error(self, info: ErrorInfo) -> bytes:
        """What is said before a request is handed on, of a key for example: as the class says it without options."""
        try:
            return self._kind.error(self, info)
        except Exception:
            return super().error(info)


class Hand:
    """ASGI: hands a request on to the first process, and its answer back, both as they come."""

    def __init__(self, folder: Path) -> None:
        self._transport = httpx.AsyncHTTPTransport(
            uds=str(folder / DOOR), limits=httpx.Limits(keepalive_expiry=_IDLE)
        )  # fmt: skip

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(name, value) for name, value in scope["headers"] if name not in _HOP]
        complete, has_body = asyncio.Event(), any(name in _BODY for name, _ in scope["headers"])

        async def content() -> AsyncIterator[bytes]:
            more = True
            while more:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientGone
                yield message.get("body", b"")
                more = message.get("more_body", False)
            complete.set()

        async def afterwards() -> Message:
            await complete.wait()
            return await receive()

        if not has_body:
            complete.set()
        target = quote(scope["path"], safe=_PLAIN).encode() + b"?" * bool(scope["query_string"]) + scope["query_string"]
        asked = httpx.Request(
            scope["method"], httpx.URL("http://first").copy_with(raw_path=target), headers=headers,
            content=content() if has_body else None,
        )  # fmt: skip
        with suppress(ClientGone):  # then the first process sees that, too
            await while_connected(afterwards, self._passed(asked, scope, receive, send))

    async def _passed(self, asked: httpx.Request, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            answer = await self._transport.handle_async_request(asked)
        except httpx.TransportError as error:
            busy = EngineBusy(f"the first process does not answer: {type(error).__name__}", fix="try again in a while")
            await error_response(busy.info())(scope, receive, send)
            return
        try:
            told = [(name.lower(), value) for name, value in answer.headers.raw]
            told = [(name, value) for name, value in told if name not in _HOP]
            await send({"type": "http.response.start", "status": answer.status_code, "headers": told})
            assert isinstance(answer.stream, httpx.AsyncByteStream)
            async for part in answer.stream:
                await send({"type": "http.response.body", "body": part, "more_body": True})
            await send({"type": "http.response.body", "body": b""})
        finally:
            await answer.aclose()

    async def close(self) -> None:
        await self._transport.aclose()

"""The first thing every request meets: host, key, sizes. Plain ASGI, so that it costs microseconds per request."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Callable, Iterable
from uuid import uuid4

from lmkit.api import LmkitError
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lmkit_http.access import Access, Caller, key_of
from lmkit_http.encoding import ENCODINGS, UnsupportedEncoding
from lmkit_http.errors import ErrorWriter, HttpError, error_response
from lmkit_http.page import page, wants_page
from lmkit_http.settings import ServerSettings

# names that no stranger can have: reserved ones, and how a container reaches the machine that it runs on
LOCAL_HOSTS = frozenset({"localhost", "host.docker.internal", "host.containers.internal"})
ID, MAX_ID = b"x-request-id", 128
LOCAL_SUFFIXES = (".localhost", ".local", ".internal")


class Gate:
    """Refuses before routing, so unknown paths and methods reveal nothing without a key."""

    def __init__(self, app: ASGIApp, settings: ServerSettings, writer: Callable[[Scope], ErrorWriter]) -> None:
        """`writer`: how the sender of a request reads errors."""
        self._app, self._writer, self._check = app, writer, HeaderCheck(settings)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return
        send = _with_id(scope, send)
        try:
            caller = self._check(scope)
        except LmkitError as e:
            info = e.info()
            refused = info.status == 401 and wants_page(scope)
            response = page(401) if refused else error_response(info, self._writer(scope))
            await response(scope, receive, send)
            return
        await self._app({**scope, "state": {**scope.get("state", {}), "caller": caller}}, receive, send)


def _with_id(scope: Scope, send: Send) -> Send:
    """Every answer has `x-request-id`: the client's, or a new one, unless whoever answers gave it another one."""

    async def named(message: Message) -> None:
        if message["type"] == "http.response.start" and not any(n == ID for n, _ in message.get("headers", ())):
            message = {**message, "headers": [*message.get("headers", ()), (ID, request_id(scope["headers"]))]}
        await send(message)

    return named


def request_id(headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """The id that a client gave its request, where it may stand in a header; else a new one."""
    given = next((value for name, value in headers if name == ID), b"")
    if 0 < len(given) <= MAX_ID and all(0x21 <= byte <= 0x7E for byte in given):
        return given
    return f"req-{uuid4().hex}".encode()


class HeaderCheck:
    """What a request must have before anything of it is looked at: (path, method, headers) of its scope are read."""

    def __init__(self, settings: ServerSettings) -> None:
        self._access = Access(settings)
        names = [h.lower().removesuffix(".") for h in settings.allowed_hosts]
        self._hosts = frozenset(names)
        self._suffixes = tuple(name for name in names if name.startswith("."))
        self._local = settings.local_hosts
        if self._local:
            self._hosts |= LOCAL_HOSTS | {socket.gethostname().lower()}
            self._suffixes += LOCAL_SUFFIXES
        self._max_body, self._max_headers = settings.max_body, settings.max_headers

    def __call__(self, scope: Scope) -> Caller:
        """Who sent it. Raises HttpError."""
        hosts, keys, length, total, origin = [], [], None, 0, None
        for name, value in scope["headers"]:
            total += len(name) + len(value)
            if name == b"host":
                hosts.append(value)
            elif name in (b"authorization", b"x-api-key"):
                keys.append(key_of(name, value))
            elif name == b"origin":
                origin = value
            elif name == b"content-length":
                length = value
            elif (
                name == b"content-encoding" and (value.strip().lower().decode("latin-1") or "identity") not in ENCODINGS
            ):
                raise UnsupportedEncoding
        if total > self._max_headers:
            raise HttpError(
                431, "headers-too-large", f"the headers have {total} bytes, the limit is {self._max_headers}"
            )
        if len(hosts) > 1:
            raise HttpError(400, "host", "a request has one Host header")
        host = b"".join(hosts)
        caller = self._access.check(scope, keys, origin, host)
        if (self._hosts or self._local) and not self._is_known(_host_name(host)):
            raise HttpError(421, "host", "this server does not answer for that host name", fix="see --allowed-host")
        limit = self._max_body
        if length is not None and (not length.isdigit() or (limit is not None and int(length[:20]) > limit)):
            raise HttpError(413, "body-too-large", f"the body is larger than {limit} bytes")
        return caller

    def _is_known(self, name: str) -> bool:
        """Whether a page of the web cannot have made its own name mean this machine (DNS rebinding)."""
        return name in self._hosts or name.endswith(self._suffixes or ("\0",)) or (self._local and _is_address(name))


def _host_name(host: bytes) -> str:
    name = host.decode("latin-1").lower().strip()
    if name.startswith("["):
        return name.partition("]")[0] + "]"
    return name.partition(":")[0].removesuffix(".")


def _is_address(name: str) -> bool:
    """Whether no name server was asked for it. Only forms that no resolver takes for a name."""
    try:
        ipaddress.ip_address(name[1:-1] if name.startswith("[") else name)
    except ValueError:
        return False
    return True

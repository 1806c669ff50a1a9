"""The first thing every request meets: host, key, sizes. Plain ASGI, so that it costs microseconds per request."""

from __future__ import annotations

from collections.abc import Callable

from lmkit.api import LmkitError
from starlette.types import ASGIApp, Receive, Scope, Send

from lmkit_http.access import Access, Caller, key_of
from lmkit_http.errors import ErrorWriter, HttpError, error_response
from lmkit_http.page import page, wants_page
from lmkit_http.settings import ServerSettings

LOCAL_HOSTS = frozenset({"localhost", "127.0.0.1", "[::1]", "::1"})


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
        try:
            caller = self._check(scope)
        except LmkitError as e:
            info = e.info()
            refused = info.status == 401 and wants_page(scope)
            response = page(401) if refused else error_response(info, self._writer(scope))
            await response(scope, receive, send)
            return
        await self._app({**scope, "state": {**scope.get("state", {}), "caller": caller}}, receive, send)


class HeaderCheck:
    """What a request must have before anything of it is looked at: (path, method, headers) of its scope are read."""

    def __init__(self, settings: ServerSettings) -> None:
        self._access = Access(settings)
        self._hosts = frozenset(h.lower() for h in settings.allowed_hosts)
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
            elif name == b"content-encoding" and value.lower() != b"identity":
                raise HttpError(415, "unsupported-encoding", "compressed request bodies are not accepted")
        if total > self._max_headers:
            raise HttpError(
                431, "headers-too-large", f"the headers have {total} bytes, the limit is {self._max_headers}"
            )
        if len(hosts) > 1:
            raise HttpError(400, "host", "a request has one Host header")
        host = b"".join(hosts)
        caller = self._access.check(scope, keys, origin, host)
        if self._hosts and _host_name(host) not in self._hosts:
            raise HttpError(421, "host", "this server does not answer for that host name", fix="see --allowed-host")
        limit = self._max_body
        if length is not None and (not length.isdigit() or (limit is not None and int(length[:20]) > limit)):
            raise HttpError(413, "body-too-large", f"the body is larger than {limit} bytes")
        return caller


def _host_name(host: bytes) -> str:
    name = host.decode("latin-1").lower().strip()
    if name.startswith("["):
        return name.partition("]")[0] + "]"
    return name.partition(":")[0]

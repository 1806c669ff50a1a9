"""The door: who has no room is told so as soon as the headers are here, before a request is made of them.

An overloaded server refuses far more than it answers, and each refusal takes time from the answers, on the same event
loop. So what the routes would refuse for lack of room, of the server or of a key, is written here as bytes. All that is
unusual (other errors, other sites, paths with parameters) is left to the routes, which say the same at greater length.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from http import HTTPStatus

from lmkit.api import ErrorInfo, LmkitError
from starlette.types import Scope

from lmkit_http.access import Caller
from lmkit_http.access_log import log
from lmkit_http.admission import DEADLINE_HEADER, Overloaded, RateLimited, retry_after
from lmkit_http.backend import Backend
from lmkit_http.dialect import Dialect
from lmkit_http.error_bodies import written_error
from lmkit_http.errors import public, retry_headers
from lmkit_http.gate import request_id

_EVERY = 1.0  # seconds between two lines of the log: a line for each would cost more than the refusals
_BODIES = 256  # that are remembered
_LEFT_ALONE = frozenset({b"origin", DEADLINE_HEADER.encode()})  # requests with these headers


class Door:
    """Asked for each request that could be refused here.

    One that it lets in takes its place a moment later, when the event loop gets to its task. All that are read together
    come here before that, so those on their way are counted: else a burst would find the one free place free for each,
    and be refused by the routes, each at five times the cost.
    """

    def __init__(
        self, backend: Backend, check: Callable[[Scope], Caller], dialects: Sequence[Dialect], others: Collection[str]
    ) -> None:
        """`check`: who sent a request, by its headers; raises LmkitError. `others`: paths of the server's own."""
        self._backend, self._check, self._root = backend, check, backend.settings.root_path
        self._coming = 0  # let in, and not yet at the routes
        plain: dict[str, Dialect] = {}  # of each path to which something may be posted, in the order of the routes
        posted = [(dialect, _posted(dialect)) for dialect in sorted(dialects, key=lambda d: d.mark is not None)]
        for dialect, paths in posted:
            for path in paths:
                if not (dialect.mark and path in others):
                    plain.setdefault(path, dialect)
        self._marked = {  # likewise, of a request with a mark
            dialect.mark.encode(): plain | dict.fromkeys(paths, dialect) for dialect, paths in posted if dialect.mark
        }
        self._plain = plain
        self._bodies: dict[tuple[Dialect, ErrorInfo], bytes] = {}  # most refusals say what those before them said
        self._refused: Counter[tuple[str, int]] = Counter()  # since the last line of the log

    def refusal(self, path: str, headers: list[tuple[bytes, bytes]]) -> tuple[bytes, bytes] | None:
        """The answer to a POST that has no room: its head, to which more headers may be added, and its body. None: who
        answers it is not the door."""
        if self._root and (path == self._root or path.startswith(self._root + "/")):
            path = path[len(self._root) :] or "/"
        spoken = self._plain
        for name, _ in headers:
            if name in self._marked:
                spoken = self._marked[name]
            elif name in _LEFT_ALONE:
                return None
        dialect, backend = spoken.get(path), self._backend
        if dialect is None or backend.draining or backend.client.state != "ready":
            return None
        if backend.admission.tight(self._coming):
            try:
                caller = self._check({"method": "POST", "path": path, "headers": headers})
                backend.admission.check(caller.tenant, self._coming)
            except (Overloaded, RateLimited) as error:
                return self._written(error, dialect, path, headers)
            except LmkitError:
                return None
        self._coming += 1
        asyncio.get_running_loop().call_soon(self._came)  # just before its task, which is not there yet
        return None

    def _came(self) -> None:
        self._coming -= 1

    def _written(
        self, error: Overloaded | RateLimited, dialect: Dialect, path: str, headers: list[tuple[bytes, bytes]]
    ) -> tuple[bytes, bytes]:
        info = error.info()
        if (body := self._bodies.get((dialect, info))) is None:
            if len(self._bodies) >= _BODIES:
                self._bodies.clear()
            body = self._bodies[dialect, info] = written_error(dialect, public(info))
        self._backend.metrics.http(path, info.status)
        if log.isEnabledFor(logging.INFO):
            if not self._refused:
                asyncio.get_running_loop().call_later(_EVERY, self._tell)
            self._refused[path, info.status] += 1
        told = "".join(
            f"{name.lower()}: {value}\r\n" for name, value in retry_headers(info, retry_after(error)).items()
        )
        told += f"x-request-id: {request_id(headers).decode()}\r\n"
        head = f"HTTP/1.1 {info.status} {HTTPStatus(info.status).phrase}\r\n{told}content-type: application/json\r\n"
        return f"{head}content-length: {len(body)}\r\n".encode(), body

    def _tell(self) -> None:
        refused, self._refused = self._refused, Counter()
        for (path, status), num in refused.items():
            told = {"method": "POST", "path": path, "status": status, "num": num}
            log.info("%(method)s %(path)s %(status)d, %(num)d times within a second", told)


def _posted(dialect: Dialect) -> list[str]:
    """The paths without parameters that its routes POST to."""
    routes = (route.split(" ") for route in dialect.routes)
    return [path for method, path in routes if method == "POST" and "{" not in path]

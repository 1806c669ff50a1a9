"""A listener for applications that are no served model, such as `lmkit split`: with the same gate, bounds and rules.

Whatever listens for clients is served by `serve_bounded` or by `run.serve`. Both refuse public addresses without a key,
check keys, hosts and origins of each request, and bound headers, bodies, connections that wait, and slow readers.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from lmkit_http.accepting import AcceptingServer, Acceptor
from lmkit_http.access_log import AccessLog
from lmkit_http.dialect import error_json
from lmkit_http.gate import Gate
from lmkit_http.limits import MOST_BODY
from lmkit_http.listening import Certificate, bind, bind_beside, release, url_of
from lmkit_http.run import BACKLOG, known_to, loop_factory, short_turns, transport

if TYPE_CHECKING:
    import socket

    from starlette.types import ASGIApp

    from lmkit_http.settings import ServerSettings

GRACE = 5  # seconds that requests get when the server stops
log = logging.getLogger("lmkit.server")


def gated(app: ASGIApp, settings: ServerSettings) -> ASGIApp:
    """`app` behind the checks of hosts, origins, keys and sizes, with a line of the log for each request."""
    if settings.max_body is None:
        settings = replace(settings, max_body=MOST_BODY)
    return AccessLog(Gate(app, known_to(settings), lambda scope: error_json))


def serve_bounded(
    app: ASGIApp, settings: ServerSettings, close: Callable[[], Awaitable[None]] | None = None,
    ready: Callable[[str], None] | None = None,
) -> None:  # fmt: skip
    """Blocks until SIGTERM or SIGINT, then answers what is under way and calls `close`. `ready` is told the address.

    Raises ConfigError for a public address without a key, PortInUse.
    """
    sock = bind(settings)
    short_turns()
    try:
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            runner.run(_serve(gated(app, settings), settings, sock, close, ready))
    finally:
        release(sock)


async def _serve(
    app: ASGIApp, settings: ServerSettings, sock: socket.socket, close: Callable[[], Awaitable[None]] | None,
    ready: Callable[[str], None] | None,
) -> None:  # fmt: skip
    config = transport(app, settings, timeout_graceful_shutdown=GRACE)
    server = AcceptingServer(config)
    listeners = [sock, *bind_beside(settings, sock)]
    loop, tasks = asyncio.get_running_loop(), []
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, partial(setattr, server, "should_exit", True))
    if settings.tls_cert:
        certificate = Certificate(settings.tls_cert, settings.tls_key)
        config.load()
        config.ssl = certificate.context
        tasks.append(asyncio.ensure_future(certificate.watch()))
    serving = asyncio.ensure_future(server._serve([]))
    try:
        while not (server.started or serving.done()):
            await asyncio.sleep(0.005)
        for listener in listeners:
            listener.setblocking(False)
            listener.listen(BACKLOG)
            server.accept(Acceptor(listener, server))
        if ready is not None:
            ready(url_of(sock, settings))
        await serving
    finally:
        for task in (serving, *tasks):
            task.cancel()
        for listener in listeners[1:]:
            listener.close()
        if close is not None:
            await close()

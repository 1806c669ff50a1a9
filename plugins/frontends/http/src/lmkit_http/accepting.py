"""Connections are accepted many at a time; where several processes listen, each comes to the one that has fewest.

An event loop accepts one connection between two looks at all others (uvloop), so that on a busy server new ones, the
probes of an orchestrator too, wait for seconds before anybody may refuse them. Here all that wait are taken at once.

Where several processes listen at one socket, the kernel wakes all of them, and whoever slept least deeply takes
everything: on a server that is not busy that is the same one again and again, which then has all the connections that
clients keep for when there is much to ask. So who has more than another lets a moment pass first.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from functools import partial

import uvicorn

from lmkit_http.counts import CONNECTIONS, Counts

PAUSE = 0.004  # seconds in which another process may take a connection
PAUSES = 3  # then it hangs, or is on its way to one
AT_ONCE = 128  # connections: they take a few ms
SHARED_AT_ONCE = 4  # likewise, where other processes may take the rest
TOLD = 0.05  # seconds between two looks at what is open
FULL = 0.5  # seconds after the system had no room for another one

log = logging.getLogger("lmkit.server")


class Acceptor:
    """For a server that has started, and has no socket of its own."""

    def __init__(self, sock: socket.socket, server: uvicorn.Server, counts: Counts | None = None) -> None:
        """`counts`: of all processes that listen at the socket; None: it is this one alone."""
        self._sock, self._server, self._counts = sock, server, counts
        self._opening: set[asyncio.Task[None]] = set()
        self._pauses = 0
        self._loop = asyncio.get_running_loop()

    async def run(self) -> None:
        """Until it is cancelled."""
        self._resume()
        try:
            while True:
                if self._counts is not None:
                    self._told(self._counts)
                await asyncio.sleep(TOLD)
        finally:
            self._loop.remove_reader(self._sock)
            for task in self._opening:
                task.cancel()

    def _told(self, counts: Counts) -> int:
        num = len(self._server.server_state.connections) + len(self._opening)
        counts.put(CONNECTIONS, num)
        return num

    def _gives_way(self) -> bool:
        """Whether another process has fewer connections, and a moment to take this one."""
        counts = self._counts
        if counts is None or self._pauses >= PAUSES or self._told(counts) <= counts.least(CONNECTIONS):
            self._pauses = 0
            return False
        self._pauses += 1
        self._rest(PAUSE)
        return True

    def _resume(self) -> None:
        if self._sock.fileno() >= 0:
            self._loop.add_reader(self._sock, self._look)

    def _rest(self, seconds: float) -> None:
        self._loop.remove_reader(self._sock)
        self._loop.call_later(seconds, self._resume)

    def _look(self) -> None:
        for _ in range(AT_ONCE if self._counts is None else SHARED_AT_ONCE):
            if self._gives_way():
                return
            try:
                connection, _ = self._sock.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                log.error("no connection can be accepted: %s", error.strerror)
                self._rest(FULL)
                return
            task = asyncio.ensure_future(self._open(connection))
            self._opening.add(task)
            task.add_done_callback(self._opening.discard)

    async def _open(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        config, server = self._server.config, self._server
        protocol = partial(
            config.http_protocol_class, config=config, server_state=server.server_state,  # type: ignore[call-arg]
            app_state=server.lifespan.state,
        )  # fmt: skip
        try:
            await self._loop.connect_accepted_socket(protocol, connection, ssl=config.ssl)
        except OSError as error:  # of TLS, too: who connected is told, and nobody else is concerned
            log.debug("a connection did not come about: %s", error)
            connection.close()


class AcceptingServer(uvicorn.Server):
    """uvicorn without sockets of its own: connections come from Acceptors, until it stops."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._accepting: list[asyncio.Future[None]] = []

    def accept(self, acceptor: Acceptor) -> None:
        """Connections are accepted until the server stops."""
        self._accepting.append(asyncio.ensure_future(acceptor.run()))

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Nobody is accepted any more, whoever still is answered."""
        for task in self._accepting:
            task.cancel()
        await super().shutdown(sockets)

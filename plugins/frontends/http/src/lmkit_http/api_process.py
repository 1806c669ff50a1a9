"""A process that answers HTTP: `python -m lmkit_http.api_process CHANNEL LISTENER`, two descriptors.

CHANNEL is its end of a socket, behind which the first process has the engine; at LISTENER clients connect. It ends when
told to, and when the other end of the channel closes, however that came about.
"""

from __future__ import annotations

import asyncio
import faulthandler
import gc
import logging
import shutil
import signal
import socket
import sys
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from lmkit.api import EngineDead
from lmkit.config import EngineConfig, from_dict
from lmkit.engine.messages import Command, EngineFacts, Report, Splitter, encode
from lmkit.engine.streams import BaseClient
from lmkit.logs import TIMED, write_json, written_logs
from lmkit.plugins import load_ref

from lmkit_http.api_wire import Drain, Listening, Seen, Standing, ToApi, Welcome, decode_to

CHUNK = 1 << 18  # bytes per read
LAST_WORDS = 1.0  # seconds in which streams say that the first process is gone
AHEAD = ("lmkit_http.run", "lmkit_http.app", "lmkit_http.handing", "lmkit.text.side", "lmkit.plugins.host")

log = logging.getLogger("lmkit.server")


class FirstProcess(BaseClient):
    """The engine as an API process sees it: at the other end of a socket, with what was said of it last."""

    def __init__(self, facts: EngineFacts, transport: asyncio.Transport) -> None:
        super().__init__()
        self.facts, self._transport, self._was_ready = facts, transport, True
        self.adapters: set[str] = set()  # names; whoever answers has this very set
        self._standing: Standing | None = None

    async def start(self) -> None:
        """It was ready before."""

    def _send(self, command: Command) -> None:
        self.say(command)

    def say(self, message: Any) -> None:
        if not self._transport.is_closing():
            self._transport.write(encode(message))

    def stands(self, standing: Standing) -> None:
        self._standing, self.failure = standing, standing.failure
        if self.state != "draining":
            self.state = standing.state
        self.adapters.clear()
        self.adapters.update(standing.adapters)
        self.say(Seen(standing.number))

    def received(self, report: Report) -> None:
        self._receive(report)

    def lost(self) -> None:
        self._die(EngineDead("the first process of the server is gone").info())

    @property
    def responsive(self) -> bool:
        return self._standing is not None and self._standing.responsive

    async def close(self) -> None:
        self._die(None)


class Channel(asyncio.Protocol):
    """Messages of the first process, from the second on."""

    def __init__(self, splitter: Splitter) -> None:
        self._splitter = splitter
        self._waiting: list[ToApi] = []
        self.client: FirstProcess | None = None
        self.drain = asyncio.Event()
        self.gone = asyncio.Event()

    def data_received(self, data: bytes) -> None:
        for payload in self._splitter.feed(data):
            self.take(decode_to(payload))

    def take(self, message: ToApi) -> None:
        if isinstance(message, Drain):
            self.drain.set()
        elif self.client is None:
            self._waiting.append(message)
        elif isinstance(message, Standing):
            self.client.stands(message)
        else:
            assert not isinstance(message, Welcome)
            self.client.received(message)

    def connection_lost(self, exc: Exception | None) -> None:
        self.gone.set()
        if self.client is not None:
            self.client.lost()

    def serve(self, client: FirstProcess) -> None:
        """From now on what comes is for `client`."""
        self.client = client
        waiting, self._waiting = self._waiting, []
        for message in waiting:
            self.take(message)
        if self.gone.is_set():
            client.lost()


@dataclass
class Served:
    """What build_app needs."""

    client: FirstProcess
    text: Any  # TextSide
    resolved: Any

    @property
    def facts(self) -> EngineFacts:
        return self.client.facts


async def answer(
    welcome: Welcome, config: EngineConfig, channel: Channel, transport: asyncio.Transport, sock: socket.socket
) -> None:
    """Until it is told to drain, or nobody is there who might."""
    from lmkit.plugins.host import PluginHost

    from lmkit_http.accepting import Acceptor
    from lmkit_http.app import build_app
    from lmkit_http.dialects import load_dialects
    from lmkit_http.handing import Elsewhere, Hand, Part, counts_of
    from lmkit_http.listening import Certificate
    from lmkit_http.run import Server
    from lmkit_http.run import transport as how
    from lmkit_http.traces import sent

    settings, folder = welcome.settings, Path(welcome.folder)
    open_text = load_ref(welcome.text, "text side")
    opening = asyncio.ensure_future(asyncio.to_thread(open_text, welcome.checkpoint, welcome.resolved, config))
    host = PluginHost(switches=welcome.switches)
    dialects = await asyncio.to_thread(load_dialects, host, config.plugins, Elsewhere)
    hand = Hand(folder)
    part = Part(folder, counts_of(folder, settings, welcome.place), welcome.created, welcome.place, hand)
    client = FirstProcess(welcome.facts, transport)
    app = build_app(Served(client, await opening, welcome.resolved), settings, dialects, part)
    backend = app.state.backend
    client.adapters = backend.adapters
    client.stands(welcome.standing)
    channel.serve(client)
    certificate = Certificate(settings.tls_cert, settings.tls_key) if settings.tls_cert else None
    server = Server(how(app, settings, timeout_graceful_shutdown=5, backlog=2048), backend, certificate)

    async def ready() -> None:
        gc.enable()
        gc.freeze()  # what lives now lives as long as the process
        server.accept(Acceptor(sock, server, part.counts))
        client.say(Listening())

    async def told() -> None:
        await channel.drain.wait()
        server.stop()

    async def alone() -> None:
        await channel.gone.wait()
        shutil.rmtree(folder, ignore_errors=True)  # nobody else does
        await asyncio.sleep(LAST_WORDS)
        server.force_exit = server.should_exit = True

    with sent(backend):
        await server.run_until_told(None, ready, [told(), alone()])
    await hand.close()


def main(channel: int, listener: int) -> int:
    gc.disable()  # until it listens: what is imported stays
    faulthandler.enable()
    for number in (signal.SIGINT, signal.SIGTERM):  # the first process decides
        signal.signal(number, signal.SIG_IGN)
    for name in AHEAD:
        with suppress(ImportError):  # whoever needs it says so
            import_module(name)
    with socket.socket(fileno=channel) as wire, socket.socket(fileno=listener) as sock:
        wire.set_inheritable(False)
        sock.set_inheritable(False)
        splitter, payloads = Splitter(), list[bytes]()
        while not payloads:
            if not (data := wire.recv(CHUNK)):
                return 0
            payloads += splitter.feed(data)
        welcome = decode_to(payloads[0])
        assert isinstance(welcome, Welcome), welcome
        return run(welcome, [decode_to(payload) for payload in payloads[1:]], splitter, wire, sock)


def run(
    welcome: Welcome, more: list[ToApi], splitter: Splitter, wire: socket.socket, sock: socket.socket
) -> int:  # fmt: skip
    from lmkit_http.run import loop_factory, short_turns

    config = from_dict(welcome.config)
    short_turns()

    async def serve() -> None:
        channel = Channel(splitter)
        transport, _ = await asyncio.get_running_loop().connect_accepted_socket(lambda: channel, wire)
        for message in more:
            channel.take(message)
        await answer(welcome, config, channel, transport, sock)

    level = logging.getLevelNamesMapping()[(config.log_level or "info").upper()]
    with written_logs(TIMED, level, f"api {welcome.place}"), asyncio.Runner(loop_factory=loop_factory()) as runner:
        if config.log_format == "json":
            write_json()
        runner.run(serve())
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2])))

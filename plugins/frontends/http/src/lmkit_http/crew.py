"""The processes that answer HTTP before one engine (`--api-workers`), as the first process has them.

The first one has the engine, whatever keeps state, and the listening socket, which the others inherit. To them it is
the engine: what they submit it submits, and sends them the events. One that dies is replaced, its requests are aborted.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

from lmkit.api import ConfigError, EngineError, EngineRequest, LmkitError, TokenEvent
from lmkit.config import EngineConfig, to_dict
from lmkit.engine.messages import Abort, AskStats, Done, Events, Splitter, Stats, Submit, encode, info_of
from lmkit.engine.supervisor import how_ended

from lmkit_http.api_wire import Drain, FromApi, Listening, Seen, Standing, Welcome, decode_from
from lmkit_http.handing import DOOR, METRICS

if TYPE_CHECKING:
    from lmkit.plugins.switches import Switches

    from lmkit_http.backend import Backend

TEXT = "lmkit.text.side:TextSide.open"
TRIES = 5  # in a row that do not come to listening
HEALTHY_SECONDS = 10.0  # after which a death is forgotten
FIRST_PAUSE, LAST_PAUSE = 0.25, 30.0  # seconds before a dead one is replaced
LOOK = 0.1  # seconds between looks at the engine
SEEN_SECONDS = 5.0  # in which all must have heard of an adapter
MOST_UNREAD = 256 << 20  # bytes that one does not read: it hangs
LARGE = 1 << 20  # bytes of a vector that is sent by itself
END_SECONDS = 3.0  # from the end of its connection to that of the process
SLACK = 8.0  # seconds to end, beyond what requests get

log = logging.getLogger("lmkit.server")


class Member(asyncio.Protocol):
    """One process, from its start to its end. Made before there is an event loop, then connected."""

    def __init__(self, sock: socket.socket, folder: Path) -> None:
        self.born = monotonic()
        self._socket, inherited = socket.socketpair()
        with inherited:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "lmkit_http.api_process", str(inherited.fileno()), str(sock.fileno())],
                pass_fds=[inherited.fileno(), sock.fileno()],
                stdin=subprocess.DEVNULL,
                process_group=0,  # Ctrl-C reaches the first process only; it decides
                env={**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(folder)},
            )
        self.listening, self.gone = asyncio.Event(), asyncio.Event()
        self._splitter = Splitter()
        self._transport: asyncio.Transport | None = None
        self._backend: Backend | None = None
        self._open: dict[str, asyncio.Task[None]] = {}  # its requests
        self.adapters: dict[str, tuple[bool, str]] = {}  # of them, those for an adapter: whether they have a token
        self._asking: set[asyncio.Task[None]] = set()
        self._events: list[TokenEvent] = []  # of this moment
        self._seen: dict[int, asyncio.Event] = {}

    @property
    def answers(self) -> bool:
        return self.listening.is_set() and not self.gone.is_set()

    async def connect(self, backend: Backend, welcome: Welcome) -> None:
        self._backend = backend
        loop = asyncio.get_running_loop()
        self._transport, _ = await loop.connect_accepted_socket(lambda: self, self._socket)
        self.say(welcome)

    def say(self, message: Any) -> None:
        if self._transport is None or self._transport.is_closing():
            return
        self._transport.write(encode(message))
        if self._transport.get_write_buffer_size() > MOST_UNREAD:
            log.error("API process %d reads nothing", self.process.pid)
            self.process.kill()

    async def tell(self, standing: Standing) -> None:
        """Returns when it has heard it, or is gone."""
        seen = self._seen[standing.number] = asyncio.Event()
        self.say(standing)
        await _first(seen, self.gone, timeout=SEEN_SECONDS)
        del self._seen[standing.number]

    def data_received(self, data: bytes) -> None:
        for payload in self._splitter.feed(data):
            self._take(decode_from(payload))

    def _take(self, message: FromApi) -> None:
        assert self._backend is not None
        match message:
            case Submit(request):
                self._open[request.id] = asyncio.ensure_future(self._relay(request))
            case Abort(ids):
                self._backend.client.abort([id for id in ids if id in self._open])
            case AskStats(number):
                asking = asyncio.ensure_future(self._ask(number))
                self._asking.add(asking)
                asking.add_done_callback(self._asking.discard)
            case Listening():
                self.listening.set()
            case Seen(number):
                if number in self._seen:
                    self._seen[number].set()

    async def _relay(self, request: EngineRequest) -> None:
        assert self._backend is not None
        if request.adapter is not None:
            self.adapters[request.id] = False, request.adapter
        try:
            async for event in self._backend.client.submit(request):
                if request.adapter is not None:
                    self.adapters[request.id] = True, request.adapter
                if event.pooled is not None and len(event.pooled.data) > LARGE:
                    self.say(Events([event]))
                    continue
                if not self._events:  # those of the same step follow at once
                    asyncio.get_running_loop().call_soon(self._flush)
                self._events.append(event)
        finally:
            self._open.pop(request.id, None)
            self.adapters.pop(request.id, None)

    def _flush(self) -> None:
        events, self._events = self._events, []
        self.say(Events(events))

    async def _ask(self, number: int) -> None:
        assert self._backend is not None
        try:
            self.say(Stats(number, await self._backend.client.stats()))
        except LmkitError as error:
            self.say(Done(number, info_of(error)))

    def connection_lost(self, exc: Exception | None) -> None:
        """It died, or ended: nobody waits for its requests any more."""
        assert self._backend is not None
        self._backend.client.abort(list(self._open))
        self._ending = asyncio.ensure_future(self._end())

    async def _end(self) -> None:
        """It may have something to log."""
        with suppress(subprocess.TimeoutExpired):
            await asyncio.to_thread(self.process.wait, END_SECONDS)
        self.process.kill()
        await asyncio.to_thread(self.process.wait)
        self.gone.set()

    def disconnect(self) -> None:
        """While there is an event loop."""
        if self._transport is not None:
            self._transport.close()

    def close(self) -> None:
        """Ends it at once. Idempotent."""
        self._socket.close()
        self.process.kill()
        self.process.wait()


@dataclass(frozen=True)
class Plan:
    """What is needed to answer, beside what the application knows."""

    config: EngineConfig
    checkpoint: Any
    switches: Switches | None = None
    text: str = TEXT


class Crew:
    """All of them. A folder of the server's own has what they share; `close` removes it."""

    def __init__(self, num: int, sock: socket.socket) -> None:
        """They start now, and import what they need while the engine is made ready."""
        self.folder = _folder()
        self._sock = sock
        self._members = [self._made() for _ in range(num)]
        self._draining = False
        self._numbers = 0
        self._tasks: list[asyncio.Task[None]] = []
        self.on_end: Callable[[], None] = lambda: None  # called when none can be started any more
        self.failed = False

    def _made(self) -> Member:
        return Member(self._sock, self.folder / METRICS)

    async def start(self, backend: Backend, plan: Plan) -> None:
        """Returns when all answer. Raises EngineError when one does not come to that."""
        self._backend, self._plan = backend, plan
        backend.spread = self._spread
        backend.elsewhere = lambda: [one for member in self._members for one in member.adapters.values()]
        await asyncio.gather(*(self._connect(place) for place in range(len(self._members))))
        for member in self._members:
            await _first(member.listening, member.gone)
            if self._draining:
                return
            if not member.listening.is_set():
                raise EngineError(
                    f"an API process {how_ended(member.process.poll())} before it answered", fix="its log has the cause"
                )
        self._tasks = [asyncio.ensure_future(self._keep(place)) for place in range(len(self._members))]
        self._tasks.append(asyncio.ensure_future(self._watch()))

    async def _connect(self, place: int) -> None:
        backend, plan = self._backend, self._plan
        assert backend.part is not None
        welcome = Welcome(
            plan.text, to_dict(plan.config), backend.plan, plan.checkpoint, backend.settings, backend.facts,
            plan.switches, backend.part.created, str(self.folder), place + 1, self._standing(),
        )  # fmt: skip
        await self._members[place].connect(backend, welcome)

    def _standing(self) -> Standing:
        client = self._backend.client
        self._numbers += 1
        adapters = tuple(sorted(self._backend.adapters))
        return Standing(self._numbers, client.state, client.ended, client.responsive, client.failure, adapters)

    async def _spread(self) -> None:
        """What has changed is known everywhere afterwards."""
        standing = self._standing()
        await asyncio.gather(*(member.tell(standing) for member in self._members if member.answers))

    async def _watch(self) -> None:
        before = None
        while True:
            client = self._backend.client
            now = client.state, client.ended, client.responsive
            if now != before:
                before = now
                for member in self._members:
                    member.say(self._standing())
            await asyncio.sleep(LOOK)

    async def _keep(self, place: int) -> None:
        """Replaces the process at a place, again and again."""
        tries, pause = 0, FIRST_PAUSE
        while True:
            member = self._members[place]
            await member.gone.wait()
            assert self._backend.part is not None
            self._backend.part.counts.forget(place + 1)
            if self._draining:
                return
            tries = 0 if member.listening.is_set() else tries + 1
            if monotonic() - member.born > HEALTHY_SECONDS:
                pause = FIRST_PAUSE
            if tries >= TRIES and not any(other.answers for other in self._members):
                log.error("API processes end before they answer, again and again")
                self.failed = True
                self.on_end()
                return
            pid, how = member.process.pid, how_ended(member.process.poll())
            log.error("API process %d %s; another one starts in %.2f s", pid, how, pause)
            await asyncio.sleep(pause)
            pause = min(2 * pause, LAST_PAUSE)
            self._members[place] = self._made()
            await self._connect(place)

    def drain(self) -> None:
        """They take nothing new, answer what is there, and end."""
        self._draining = True
        for member in self._members:
            member.say(Drain())

    async def ended(self, timeout: float) -> None:
        """Waits until they have; then no longer."""
        waiting = [asyncio.ensure_future(member.gone.wait()) for member in self._members]
        await asyncio.wait(waiting, timeout=timeout + SLACK)
        self.kill()

    def kill(self) -> None:
        self._draining = True
        for member in self._members:
            member.process.kill()

    def disconnect(self) -> None:
        """Nothing more is done for them on this event loop."""
        self._draining = True
        for task in self._tasks:
            task.cancel()
        for member in self._members:
            member.disconnect()

    def close(self) -> None:
        """Ends them at once."""
        for member in self._members:
            member.close()
        shutil.rmtree(self.folder, ignore_errors=True)


def _folder() -> Path:
    """What the processes share, and nobody else may read. Raises ConfigError."""
    try:
        folder = Path(tempfile.mkdtemp(prefix="lmkit-api-"))
        (folder / METRICS).mkdir()
        with socket.socket(socket.AF_UNIX) as probe:  # the system bounds the path of a socket
            probe.bind(str(folder / DOOR))
        (folder / DOOR).unlink()
    except OSError as error:
        raise ConfigError(
            f"API processes cannot share a folder in {tempfile.gettempdir()}: {error.strerror or error}",
            fix="set TMPDIR to a short path that can be written to, or leave out --api-workers",
        ) from None
    return folder


async def _first(*events: asyncio.Event, timeout: float | None = None) -> None:
    """Until one of them is set."""
    waiting = [asyncio.ensure_future(event.wait()) for event in events]
    await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED, timeout=timeout)
    for task in waiting:
        task.cancel()

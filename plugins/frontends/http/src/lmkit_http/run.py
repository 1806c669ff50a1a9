"""serve: from a configuration to a listening server, and back down again in order."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import sys
import time
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import uvicorn
from lmkit.api import ConfigError, EngineDead
from lmkit.logs import TIMED, write_json, written_logs

from lmkit_http.accepting import AcceptingServer, Acceptor
from lmkit_http.access_log import figures
from lmkit_http.listening import Certificate, bind, bind_beside, is_loopback, release, url_of
from lmkit_http.settings import ServerSettings

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence

    from lmkit.contracts.config import EngineConfig
    from lmkit.plugins.host import PluginHost

    from lmkit_http.backend import Backend, ServedModel
    from lmkit_http.crew import Crew, Plan
    from lmkit_http.dialect import Dialect

    OnReady = Callable[[ServedModel, str], Iterable[tuple[str, float]] | None]

log = logging.getLogger("lmkit.server")


_WATCH = 0.25  # seconds between looks at the engine's state
_LAST_WORDS = 5.0  # seconds that a server without an engine says so
_LINGER = 0.25  # seconds
_TURN = 0.0005  # seconds
BACKLOG = 2048  # connections that may wait until they are accepted


def serve(
    config: EngineConfig,
    settings: ServerSettings,
    on_ready: OnReady | None = None,
    **start: Any,
) -> None:
    """Blocks until the server has drained after SIGTERM or SIGINT. Raises typed errors of start-up.

    `on_ready(llm, url)` is called when the first request would be answered, and may return the phases of the start-up
    for /debug/startup. `start`: options of AsyncLLM.start.
    """
    certificate = Certificate(settings.tls_cert, settings.tls_key) if settings.tls_cert else None
    if settings.traces:
        from lmkit_http.traces import check_traces

        check_traces(settings.traces)
    if settings.profile_dir:
        settings = replace(settings, profile_dir=_made(settings.profile_dir))
    sock = bind(settings)
    crew = None
    short_turns()
    try:
        if settings.api_workers > 1:
            from lmkit_http.crew import Crew

            crew = Crew(settings.api_workers, sock)
        level = logging.getLevelNamesMapping()[(config.log_level or "info").upper()]
        with written_logs(TIMED, level), asyncio.Runner(loop_factory=loop_factory()) as runner:
            if config.log_format == "json":
                write_json()
            runner.get_loop()  # where there can be none, before there is a coroutine that nobody awaits
            runner.run(_serve(config, settings, sock, on_ready, start, certificate, crew))
    except asyncio.CancelledError:
        raise SystemExit(128 + signal.SIGTERM) from None
    finally:
        if crew is not None:
            crew.close()
        release(sock)


def _made(folder: str) -> str:
    """The folder's whole path: the engine's process may work elsewhere. Raises ConfigError."""
    path = Path(folder).expanduser().resolve()
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{path} cannot be made: {error.strerror}", fix="choose another --profile-dir") from None
    return str(path)


async def _serve(
    config: EngineConfig,
    settings: ServerSettings,
    sock: socket.socket,
    on_ready: OnReady | None,
    start: Mapping[str, Any],
    certificate: Certificate | None,
    crew: Crew | None,
) -> None:
    from lmkit_python.llm import AsyncLLM

    serving = asyncio.current_task()
    assert serving is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, serving.cancel)  # until the server is ready
    starting = asyncio.ensure_future(AsyncLLM.start(config, **start))
    try:
        dialects = await asyncio.to_thread(
            _dialects, start.get("host"), config.plugins
        )  # here it would delay the engine's process
        llm = await starting
    except BaseException:
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        raise
    try:
        if crew is None:
            await run_app(llm, settings, sock, on_ready, dialects, certificate)
        else:
            from lmkit_http.crew import Plan

            host = start.get("host")
            plan = Plan(config, llm.checkpoint, host.switches if host is not None else None)
            await run_crew(llm, settings, sock, crew, plan, on_ready, dialects)
    finally:
        await llm.close()


def _dialects(host: PluginHost | None, options: Mapping[str, Mapping[str, object]]) -> Sequence[Dialect]:
    """Those of this environment, by the switches of `host`; the application's modules are imported on the way.

    In a thread, so with a host of its own: the other one is in use meanwhile.
    """
    import_module("lmkit_http.app")
    from lmkit.plugins.host import PluginHost

    from lmkit_http.dialects import load_dialects

    return load_dialects(PluginHost(switches=host.switches if host is not None else None), options)


async def run_app(
    llm: ServedModel,
    settings: ServerSettings,
    sock: socket.socket,
    on_ready: OnReady | None = None,
    dialects: Sequence[Dialect] | None = None,
    certificate: Certificate | None = None,
) -> None:
    """Serves on a bound socket until a signal; then drains. `dialects`: None = those of this environment."""
    from lmkit_http.app import build_app

    settings = known_to(settings)
    app = build_app(llm, settings, dialects)
    how = transport(app, settings, timeout_graceful_shutdown=5, backlog=BACKLOG)
    server = Server(how, app.state.backend, certificate)
    server.beside = bind_beside(settings, sock)
    await _until_signal(server, llm, sock, sock, settings, on_ready)


async def run_crew(
    llm: ServedModel,
    settings: ServerSettings,
    sock: socket.socket,
    crew: Crew,
    plan: Plan,
    on_ready: OnReady | None = None,
    dialects: Sequence[Dialect] | None = None,
) -> None:
    """The same by several processes: `crew` answers on the socket, this one what they hand on to it."""
    from lmkit_http.app import build_app
    from lmkit_http.handing import DOOR, Part, counts_of

    settings = known_to(settings)
    app = build_app(llm, settings, dialects, Part(crew.folder, counts_of(crew.folder, settings), int(time.time())))
    how = transport(app, settings, timeout_graceful_shutdown=5, backlog=BACKLOG)
    server = Server(how, app.state.backend, crew=crew)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as door:
        door.bind(str(crew.folder / DOOR))
        sock.setblocking(False)
        sock.listen(BACKLOG)  # from now on clients wait, whoever of the crew is there
        first = partial(crew.start, app.state.backend, plan)
        try:
            await _until_signal(server, llm, door, sock, settings, on_ready, first)
        finally:
            crew.disconnect()


def known_to(settings: ServerSettings) -> ServerSettings:
    """Without a key a web page must not reach us through a name that resolves to this machine."""
    if settings.uds or settings.api_keys or settings.allowed_hosts or not is_loopback(settings.host):
        return settings
    return replace(settings, local_hosts=True, allowed_hosts=(settings.host,))


async def _until_signal(
    server: Server,
    llm: ServedModel,
    own: socket.socket,
    sock: socket.socket,
    settings: ServerSettings,
    on_ready: OnReady | None,
    first: Callable[[], Awaitable[None]] | None = None,
) -> None:
    """`own`: where this process answers; `sock`: where clients ask; `first`: what must be done before they may."""
    url = url_of(sock, settings)

    async def ready() -> None:
        if first is not None:
            await first()
        if on_ready is not None:
            server.backend.startup = tuple(on_ready(llm, url) or ())

    from lmkit_http.traces import sent

    with sent(server.backend):
        async with server.backend.background:
            await server.run_until_signal(own, ready)


def transport(app: Any, settings: ServerSettings, **options: Any) -> uvicorn.Config:
    """How the application is served on a socket."""
    from lmkit_http.protocol import BoundedProtocol

    door = getattr(getattr(app, "state", None), "door", None)
    protocol: Any = partial(BoundedProtocol, door=door)  # called as the class would be
    return uvicorn.Config(
        app, http=protocol, log_config=None, log_level="warning",
        access_log=False, server_header=False, timeout_keep_alive=settings.keep_alive,  # type: ignore[arg-type]
        lifespan="off", ws="none", h11_max_incomplete_event_size=settings.max_headers, **options,
    )  # fmt: skip


class Server(AcceptingServer):
    """uvicorn with our own signals: drain first, then stop. A second signal stops at once."""

    def __init__(
        self,
        config: uvicorn.Config,
        backend: Backend,
        certificate: Certificate | None = None,
        crew: Crew | None = None,
    ) -> None:
        super().__init__(config)
        self.backend, self._certificate, self._crew = backend, certificate, crew
        if certificate is not None:
            config.load()
            config.ssl = certificate.context
        self._stopping: asyncio.Task[None] | None = None
        self.beside: list[socket.socket] = []  # where it listens, too

    async def run_until_signal(self, sock: socket.socket, ready: Callable[[], Awaitable[None]]) -> None:
        """Raises what the engine died of, when no signal came first."""
        loop = asyncio.get_running_loop()
        signals = (signal.SIGTERM, signal.SIGINT)
        for s in signals:
            loop.add_signal_handler(s, self.stop)
        if self._crew is not None:
            self._crew.on_end = self._end
        try:
            await self.run_until_told(sock, ready, [self._watch(), figures(self.backend)])
        finally:
            for s in signals:
                loop.remove_signal_handler(s)
        if self._stopping is None and (failure := self.backend.client.failure) is not None:
            raise EngineDead(failure.message, fix=failure.fix)
        if self._crew is not None and self._crew.failed:
            raise EngineDead("no API process can be started any more", fix="their log has the cause")

    async def run_until_told(
        self,
        sock: socket.socket | None,
        ready: Callable[[], Awaitable[None]],
        beside: Iterable[Coroutine[Any, Any, None]],
    ) -> None:
        """Until it is told to stop. `sock`: where it accepts connections; None: `ready` sees to that. `beside`: what is
        done meanwhile."""
        tasks = [asyncio.ensure_future(work) for work in beside]
        listeners = [sock, *self.beside] if sock is not None else []
        if self._certificate is not None:
            tasks.append(asyncio.ensure_future(self._certificate.watch()))
        serving = asyncio.ensure_future(self._serve([]))
        try:
            while not (self.started or serving.done()):
                await asyncio.sleep(0.005)
            if not serving.done():
                for listener in listeners:
                    listener.setblocking(False)
                    listener.listen(BACKLOG)
                    self.accept(Acceptor(listener, self))
                await ready()
            await serving
        finally:
            for task in (serving, *tasks):
                task.cancel()
            for listener in listeners:
                if listener.family != socket.AF_UNIX:  # whose path `release` removes
                    listener.close()

    async def _watch(self) -> None:
        """Without an engine there is nothing to serve: after a while in which clients learn it, the server ends.

        Whoever started the server sees its exit status, and may know better what to do.
        """
        while not self.backend.client.ended:
            await asyncio.sleep(_WATCH)
        log.error("there is no engine any more; the server ends in %g s", _LAST_WORDS)
        await asyncio.sleep(_LAST_WORDS)
        if self._stopping is None:
            self.should_exit = True

    def stop(self) -> None:
        """Drain, then end; asked again: at once."""
        if self._stopping is None:
            self._stopping = asyncio.ensure_future(self._drain())
        else:
            self._end()

    def _end(self) -> None:
        if self._crew is not None:
            self._crew.kill()
        self.force_exit = self.should_exit = True

    async def _drain(self) -> None:
        """Not ready and 503 at once; accepted requests get their time; then they end with a typed abort."""
        backend = self.backend
        backend.draining = True
        if self._crew is not None:
            self._crew.drain()
        await backend.background.stop()
        log.warning("draining: %d requests are running", backend.admission.total())
        if not await backend.idle(backend.settings.drain_timeout):
            log.warning("draining took too long: %d requests are aborted", backend.num_active)
            backend.abort_all()
            await backend.idle(2.0)
        if self._crew is not None:  # whose requests may be handed on until they have ended
            await self._crew.ended(backend.settings.drain_timeout)
        await asyncio.sleep(_LINGER)  # requests that were on their way get their 503, not a closed connection
        backend.client.drain()
        self.should_exit = True


def short_turns() -> None:
    """Threads that prepare requests take shorter turns at the interpreter. The event loop waits for one such turn each
    time it comes back from the system, so that beside busy threads the default (5 ms) makes it ten times slower."""
    sys.setswitchinterval(min(_TURN, sys.getswitchinterval()))


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """What makes uvloop's event loops, where it is installed; else None: asyncio's own."""
    try:
        import uvloop
    except ImportError:  # not available on every system
        return None
    return uvloop.new_event_loop

"""build_app: routes, and how each answers. Handlers read raw bodies, so that one parser decides what is accepted."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from lmkit.api import EngineBusy, EngineDead, ErrorInfo, LmkitError, UnsupportedTask
from pydantic import BaseModel
from starlette.applications import Starlette
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from lmkit_http import info_routes, pooling
from lmkit_http.access import Caller, caller_of
from lmkit_http.access_log import AccessLog
from lmkit_http.backlog import Backlogs
from lmkit_http.body import Bodies
from lmkit_http.chat import Chat
from lmkit_http.completions import Completions
from lmkit_http.errors import HttpError, UnknownModel, error_response, info_of, is_inside
from lmkit_http.gate import Gate
from lmkit_http.generate import Generation
from lmkit_http.limits import body_limit, queue_limit, values_limit
from lmkit_http.metrics import Metrics
from lmkit_http.schema import ChatRequest, CompletionRequest, parse
from lmkit_http.settings import ServerSettings
from lmkit_http.sse import ClientGone, EventResponse, while_connected
from lmkit_http.workers import Workers

if TYPE_CHECKING:
    from lmkit.engine.client import EngineClient
    from lmkit.engine.messages import EngineFacts
    from lmkit.text.side import TextSide

log = logging.getLogger("lmkit.server")
Kind = TypeVar("Kind", bound=BaseModel)


class Served(Protocol):
    """What the server needs of an AsyncLLM."""

    @property
    def client(self) -> EngineClient: ...
    @property
    def text(self) -> TextSide: ...
    @property
    def facts(self) -> EngineFacts: ...


class Running(Protocol):
    """A request being answered: Generation or PoolingRun."""

    @property
    def backlog(self) -> int:
        """Bytes that wait for the client to read, roughly."""
        ...

    def fail(self, error: ErrorInfo) -> None:
        """Ends it from this side with `error`."""
        ...


@dataclass
class Backend:
    """One served model, with everything the routes share."""

    client: EngineClient
    text: TextSide
    facts: EngineFacts
    settings: ServerSettings
    metrics: Metrics
    plan: Any = None  # ResolvedPlan
    adapters: set[str] = field(default_factory=set)  # names under which requests get the model with an adapter
    draining: bool = False
    running: set[Running] = field(default_factory=set)  # being answered
    num_preparing: int = 0  # accepted, not yet running
    startup: tuple[tuple[str, float], ...] = ()  # phase, seconds; from the start of the process until ready
    routes: frozenset[str] = frozenset()  # of requests for the engine
    bodies: Bodies = field(init=False)
    backlogs: Backlogs = field(init=False)
    workers: Workers = field(default_factory=Workers)

    def __post_init__(self) -> None:
        self.bodies = Bodies(body_limit(self.facts, self.settings), self.settings.max_bodies)
        self.backlogs = Backlogs(self.running)
        self._max_active = queue_limit(self.facts)

    @property
    def num_active(self) -> int:
        return len(self.running) + self.num_preparing

    def abort_all(self) -> None:
        """Ends every running request with a typed error."""
        error = EngineBusy("the server is shutting down and this request was aborted", fix="send it elsewhere").info()
        for generation in list(self.running):
            generation.fail(error)

    @property
    def model(self) -> str:
        return self.names[0]

    @property
    def names(self) -> tuple[str, ...]:
        """All names of the model itself, the main one first."""
        return self.settings.served_names or (self.facts.model,)

    def check_model(self, name: str | None) -> None:
        if name is not None and name not in self.names and name not in self.adapters:
            known = " or ".join(map(repr, [*self.names, *sorted(self.adapters)][:8]))
            raise UnknownModel(f"there is no model {name[:200]!r} here", fix=f"use {known}")

    def adapter(self, name: str | None) -> str | None:
        """The adapter that a request asks for by the model's name; None: the model itself."""
        return name if name in self.adapters else None

    def check_open(self) -> None:
        """Raises EngineBusy or EngineDead when no new generation can start."""
        state = self.client.state
        if state == "dead":
            raise EngineDead("the engine is not running", fix="try again in a while")
        if self.draining or state == "draining":
            raise EngineBusy("the server is shutting down", fix="send the request elsewhere")
        if state != "ready":
            raise EngineBusy("the engine is still starting", fix="try again in a few seconds")

    def admit(self, method: str, path: str) -> None:
        """Raises what `check_open` does, and EngineBusy when as many requests as may wait do so already.

        Asked before anything is read of a request, so that those for which there is no room take no time from others.
        """
        if path not in self.routes or method != "POST":
            return
        try:
            self.check_open()
            if self.num_active >= self._max_active:
                raise EngineBusy(f"{self.num_active} requests are waiting or running", fix="try again in a while")
        except LmkitError as e:
            self.metrics.http(path, e.status)
            raise

    async def idle(self, timeout: float) -> bool:
        """Waits until no generation is being answered."""
        end = asyncio.get_running_loop().time() + timeout
        while self.num_active and asyncio.get_running_loop().time() < end:
            await asyncio.sleep(0.02)
        return not self.num_active


def build_app(llm: Served, settings: ServerSettings | None = None) -> Starlette:
    """The application. `app.state.backend` is the Backend; draining is its business and `server.run`'s."""
    settings = settings or ServerSettings()
    settings = replace(settings, max_body=body_limit(llm.facts, settings))
    model = next(iter(settings.served_names), llm.facts.model)
    backend = Backend(llm.client, llm.text, llm.facts, settings, Metrics(model), getattr(llm, "resolved", None))
    backend.adapters.update(llm.facts.adapters)
    routes: dict[str, Any] = {
        "/v1/chat/completions": (ChatRequest, Chat), "/v1/completions": (CompletionRequest, Completions),
        **pooling.ROUTES,
    }  # fmt: skip
    backend.routes = frozenset(routes)
    app = Starlette(routes=[
        *(Route(path, _generator(backend, path, *made), methods=["POST"]) for path, made in routes.items()),
        *(Route(path, _guarded(backend, path, handler), methods=methods)
          for path, methods, handler in info_routes.routes(backend)),
    ])  # fmt: skip
    app.router.redirect_slashes = False
    app.state.backend = backend
    app.add_middleware(Gate, settings=settings, admit=backend.admit)
    if settings.cors_origins:  # outside of the gate: a browser asks beforehand, without the key
        app.add_middleware(
            CORSMiddleware, allow_origins=settings.cors_origins, allow_methods=["GET", "POST"], allow_headers=["*"],
            expose_headers=["Retry-After"],
        )  # fmt: skip
    app.add_middleware(AccessLog)
    for status in (404, 405):
        app.add_exception_handler(status, _no_route)
    return app


async def _no_route(request: Request, error: Exception) -> Response:
    status = getattr(error, "status_code", 404)
    message = "there is no such route" if status == 404 else f"{request.method} is not allowed here"
    return error_response(HttpError(status, "not-found" if status == 404 else "method", message).info())


def _guarded(
    backend: Backend, route: str, handler: Callable[[Request], Awaitable[Response]]
) -> Callable[..., Awaitable[Response]]:
    """Errors become JSON; untyped ones are logged here and hidden there."""

    async def run(request: Request) -> Response:
        try:
            response = await handler(request)
        except Exception as error:
            _log(error)
            response = error_response(info_of(error))
        backend.metrics.http(route, response.status_code)
        return response

    return run


def _log(error: BaseException) -> None:
    """The server's faults in full, but not states that were reported where they began; of refusals the code alone."""
    if not isinstance(error, LmkitError):
        log.error("a request failed", exc_info=error)
    elif is_inside(info := error.info()) and info.code != EngineDead.code:
        log.error("a request failed: %s: %s", info.code, info.message)
    elif not isinstance(error, (EngineBusy, EngineDead)):
        log.info("refused: %s%s", info.code, f" ({info.field})" if info.field else "")


def _generator(backend: Backend, route: str, kind: type[BaseModel], dialect: Any) -> Callable[..., Awaitable[Any]]:
    """The handler of a generating route."""

    async def handle(request: Request) -> Any:
        backend.num_preparing += 1
        try:
            async with backend.bodies.read(request) as body:
                # in a thread: a template or a long prompt may take its time, the other streams must not wait for it
                work = backend.workers.run(len(body), _prepare, backend, kind, dialect, body, caller_of(request.scope))
                parsed, answer, generation = await while_connected(request.receive, work)
            backend.running.add(generation)
            backend.backlogs.watch()
        finally:
            backend.num_preparing -= 1
        if parsed.stream:
            return _event_response(backend, route, generation, answer.stream(generation))
        try:
            content = await while_connected(request.receive, answer.whole(generation))
        finally:
            backend.running.discard(generation)
        return Response(content, media_type="application/json")

    async def run(request: Request) -> Any:
        try:
            response = await handle(request)
        except (ClientGone, ClientDisconnect):
            response = Response(status_code=499)
        except Exception as error:
            _log(error)
            response = error_response(info_of(error))
        if not isinstance(response, EventResponse):
            backend.metrics.http(route, response.status_code)
        return response

    return run


def _prepare(backend: Backend, kind: Any, dialect: Any, body: bytearray, caller: Caller) -> tuple[Any, Any, Generation]:
    parsed = parse(kind, body, values_limit(backend.facts, backend.settings))
    backend.check_model(parsed.model)
    parsed.check()
    caller.check_priority(parsed.priority)
    if kind in (ChatRequest, CompletionRequest) and (pooler := backend.facts.pooler) is not None:
        raise UnsupportedTask("generate", pooler.tasks)
    answer = dialect(backend, parsed, caller)
    return parsed, answer, answer.prepare()


def _event_response(
    backend: Backend, route: str, generation: Generation, chunks: AsyncIterator[bytes]
) -> EventResponse:
    def close() -> None:
        backend.running.discard(generation)
        generation.close()
        backend.metrics.http(route, response.status_code)

    response = EventResponse(chunks, close, _log)
    return response


__all__ = ["Backend", "Served", "build_app"]

"""build_app: routes, and how each answers. Handlers read raw bodies, so that one parser decides what is accepted."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import lmkit
from fastapi import FastAPI
from lmkit.api import EngineBusy, EngineDead, LmkitError
from lmkit_python.front.run import Generation, check_finish
from lmkit_python.life import EngineLife
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, Response
from starlette.routing import BaseRoute, Route
from starlette.types import Scope

from lmkit_http import explain, info_routes, life_routes
from lmkit_http.access import KEY_HEADERS, caller_of
from lmkit_http.access_log import AccessLog
from lmkit_http.admission import DEADLINE_PASSED, Place, RateLimited, retry_after
from lmkit_http.answering import goes_on, prepared, whole
from lmkit_http.backend import Backend, ServedModel
from lmkit_http.background import Background
from lmkit_http.dialect import Answer, Dialect, Exchange, Incoming
from lmkit_http.dialects import blamed, error_writer, installed_dialects, spoken_routes
from lmkit_http.door import Door
from lmkit_http.error_bodies import written_error
from lmkit_http.errors import ErrorWriter, HttpError, error_response, info_of, is_inside
from lmkit_http.gate import Gate, HeaderCheck
from lmkit_http.handing import LOCAL, Elsewhere, Part
from lmkit_http.history import Entry
from lmkit_http.limits import body_limit
from lmkit_http.listening import RootPath
from lmkit_http.metrics import Metrics
from lmkit_http.server_info import ServerInfo
from lmkit_http.settings import ServerSettings
from lmkit_http.sse import ClientGone, EventResponse, while_connected

_METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE")

log = logging.getLogger("lmkit.server")


def build_app(
    llm: ServedModel,
    settings: ServerSettings | None = None,
    dialects: Sequence[Dialect] | None = None,
    part: Part | None = None,
) -> FastAPI:
    """The application. `app.state.backend` is the Backend; draining is its business and `server.run`'s.

    What dialects do beside answering is done in an `async with app.state.backend.background`. `part`: of a server of
    several processes.
    """
    settings = settings or ServerSettings()
    settings = replace(settings, max_body=body_limit(llm.facts, settings))
    model = next(iter(settings.served_names), llm.facts.model)
    life = getattr(llm, "life", None) or EngineLife(llm.client)
    plan = getattr(llm, "resolved", None)
    metrics = Metrics(model, part.metrics if part is not None else None)
    backend = Backend(llm.client, llm.text, llm.facts, settings, metrics, life, plan, part=part)
    backend.metrics.others.register(ServerInfo(backend))
    backend.adapters.update(llm.facts.adapters)
    dialects = installed_dialects() if dialects is None else dialects
    hand = part.hand if part is not None else None
    own = [
        Route(path, _guarded(backend, path, handler), methods=methods)
        for path, methods, handler in [*info_routes.routes(backend), *life_routes.routes(backend)]
        if hand is None or path in LOCAL
    ]

    def handler(dialect: Dialect, route: str) -> Callable[..., Any]:
        handed = hand is not None and isinstance(dialect, Elsewhere)
        return hand if handed else _answering(backend, dialects, dialect, route)  # type: ignore[return-value]

    routes: list[BaseRoute] = list(spoken_routes(dialects, own, handler))
    if hand is not None:
        routes.append(Route("/{path:path}", hand, methods=None))
    app = FastAPI(
        title="lmkit", version=lmkit.__version__, docs_url=None, redoc_url=None, openapi_url=None, routes=routes
    )
    app.router.redirect_slashes = False
    app.state.backend = backend
    backend.background = Background(backend, dialects)
    spoken = [dialect for dialect in dialects if not isinstance(dialect, Elsewhere)]
    writer = partial(error_writer, dialects, routes)
    app.state.door = Door(backend, HeaderCheck(settings), spoken, [route.path for route in own])
    app.add_middleware(Gate, settings=settings, writer=writer)
    if settings.cors_origins:  # outside of the gate: a browser asks beforehand, without the key
        app.add_middleware(
            CORSMiddleware, allow_origins=settings.cors_origins, allow_methods=_METHODS, allow_headers=["*"],
            expose_headers=["Retry-After", "Server-Timing", "retry-after-ms", "x-request-id"],
        )  # fmt: skip
    if part is None or hand is not None:  # else whoever handed the request on tells of it
        app.add_middleware(AccessLog)
    if settings.root_path:
        app.add_middleware(RootPath, root=settings.root_path)
    for status in (404, 405):
        app.add_exception_handler(status, partial(_no_route, writer))
    return app


async def _no_route(writer: Callable[[Scope], ErrorWriter], request: Request, error: Exception) -> Response:
    status = getattr(error, "status_code", 404)
    message = "there is no such route" if status == 404 else f"{request.method} is not allowed here"
    info = HttpError(status, "not-found" if status == 404 else "method", message).info()
    return error_response(info, writer(request.scope))


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
    elif not isinstance(error, (EngineBusy, EngineDead, RateLimited)):
        log.info("refused: %s%s", info.code, f" ({info.field})" if info.field else "")


def _answering(
    backend: Backend, dialects: Sequence[Dialect], asked: Dialect, route: str
) -> Callable[..., Awaitable[Any]]:
    """The handler of a route of a dialect."""
    path, light = route.split(" ")[1], route in asked.light_routes

    async def handle(request: Request) -> Any:
        if light:
            return await take(request, None)
        backend.check_open()
        tenant = caller_of(request.scope).tenant
        place = backend.admission.enter(tenant, request.headers)  # before anything is read: what has no room
        try:  # takes no time from others
            response = await take(request, place)
        except BaseException:
            place.leave()
            raise
        if not isinstance(response, EventResponse):
            place.leave()
        return response

    async def take(request: Request, place: Place | None) -> Any:
        parts = explain.wanted(request.headers, backend.part is not None)
        backend.num_preparing += 1
        try:
            async with backend.bodies.read(request) as body:
                incoming = _incoming(route, body, request)
                # in a thread: a template or a long prompt may take its time, the other streams must not wait for it
                caller = caller_of(request.scope)
                arguments = (backend, dialects, asked, incoming, caller)
                work = backend.workers.run(len(body), prepared, *arguments, files=asked.files)
                dialect, found = await while_connected(request.receive, work)
            if isinstance(found, Answer):
                if isinstance(found.body, Path):
                    return FileResponse(found.body, found.status, found.headers, found.media_type)
                return Response(found.body, found.status, found.headers, found.media_type)
            exchange, generation = found
            backend.backlogs.check_room(caller.tenant, generation.reserved, len(backend.settings.api_keys) > 1)
            deadline = _deadline(place, generation)  # before it runs: what is refused here leaves nothing behind
            entry = backend.begin(exchange, generation, path, caller.tenant, incoming.headers)
        finally:
            backend.prepared()
        if exchange.streamed:
            exchange.headers |= await backend.load.headers(incoming.headers)
            chunks = _chunks(backend, dialect, exchange, generation)
            if parts:
                chunks = _explained(backend, exchange, chunks, entry, parts)
            return _event_response(backend, path, dialect, exchange, generation, chunks, deadline)
        try:
            content = await while_connected(request.receive, whole(backend, exchange, generation))
        finally:
            backend.end(generation)
            deadline()
        if parts and exchange.media_type == "application/json":
            content = explain.added(content, explain.told(backend, entry, parts))
        timing = {"server-timing": explain.server_timing(entry.lives)}
        headers = {**exchange.headers, **timing, **await backend.load.headers(incoming.headers)}
        return Response(content, headers=headers, media_type=exchange.media_type)

    async def run(request: Request) -> Any:
        try:
            response = await handle(request)
        except (ClientGone, ClientDisconnect):
            response = Response(status_code=499)
        except asyncio.CancelledError:
            raise
        except BaseException as e:  # a plugin may raise SystemExit, too
            error = blamed(e, asked, backend)
            _log(error)
            response = error_response(info_of(error), partial(written_error, asked), retry_after(error))
        if not isinstance(response, EventResponse):
            backend.metrics.http(path, response.status_code)
        return response

    return run


def _incoming(route: str, body: bytearray, request: Request) -> Incoming:
    headers = {name: value for name, value in request.headers.items() if name not in KEY_HEADERS}
    tenant = caller_of(request.scope).tenant
    return Incoming(route, body, request.path_params, dict(request.query_params), headers, tenant)


async def _chunks(
    backend: Backend, dialect: Dialect, exchange: Exchange, generation: Generation
) -> AsyncIterator[bytes]:
    """A chunk for each change. Of a turn that fails before its first change nothing is sent but the error."""
    begun, asked = set(), True
    chunk = exchange.chunk
    try:
        while asked:
            async for turn, events in generation.events():
                change = turn.message.feed(events)
                failed = change.finish is not None and change.finish.error is not None
                if failed and turn.index not in begun:
                    check_finish(turn)
                begun.add(turn.index)
                if data := chunk(turn, change):
                    yield data
                if failed:
                    check_finish(turn)
            asked = await goes_on(backend, exchange, generation)
        if data := exchange.end(generation.turns):
            yield data
    except (asyncio.CancelledError, GeneratorExit, LmkitError):
        raise
    except BaseException as e:  # a plugin may raise SystemExit, or an OSError that is no connection's
        raise blamed(e, dialect, backend) from e


async def _explained(
    backend: Backend, exchange: Exchange, chunks: AsyncIterator[bytes], entry: Entry, parts: frozenset[str]
) -> AsyncIterator[bytes]:
    """The chunks, and what the answer says of itself."""
    async for chunk in chunks:
        yield chunk
    yield exchange.explained(explain.told(backend, entry, parts))


def _deadline(place: Place | None, generation: Generation) -> Callable[[], None]:
    """Ends the generation at its deadline. What is returned is called when it is over."""
    if place is None:
        return lambda: None
    place.begin(generation.turns)
    if (remaining := place.remaining()) is None:
        return place.leave
    timer = asyncio.get_running_loop().call_later(remaining, generation.fail, DEADLINE_PASSED)

    def over() -> None:
        timer.cancel()
        place.leave()

    return over


def _event_response(
    backend: Backend, path: str, dialect: Dialect, exchange: Exchange, generation: Generation,
    chunks: AsyncIterator[bytes], over: Callable[[], None],
) -> EventResponse:  # fmt: skip
    def close(status: int) -> None:
        generation.close()
        backend.end(generation)
        over()
        backend.metrics.http(path, status)

    return EventResponse(chunks, close, _log, dialect, exchange.headers)


__all__ = ["Backend", "build_app"]

"""Routes that change the engine: pauses, sleep, an empty prefix cache, new weights. They take an administrator's key.

Weights are read from files that the request names, so a server without such keys has these routes for nobody.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import msgspec
from lmkit.api import CheckpointError, ConfigError, InvalidParam
from starlette.requests import Request
from starlette.responses import Response

from lmkit_http.access import caller_of
from lmkit_http.errors import HttpError
from lmkit_http.info_schema import UpdateWeightsRequest
from lmkit_http.strict import parse

if TYPE_CHECKING:
    from lmkit_python.life import EngineLife

    from lmkit_http.backend import Backend

Handler = Callable[[Request], Awaitable[Response]]
MODES = ("abort", "wait", "keep")


def routes(backend: Backend | None) -> list[tuple[str, list[str], Handler]]:
    """(path, methods, handler). Without a backend none of them can be asked."""
    r = _Routes(backend)
    return [
        ("/pause", ["POST"], r.changing(r.pause)),
        ("/resume", ["POST"], r.changing(r.resume)),
        ("/is_paused", ["GET"], r.is_paused),
        ("/sleep", ["POST"], r.changing(r.sleep)),
        ("/wake_up", ["POST"], r.changing(r.wake_up)),
        ("/is_sleeping", ["GET"], r.is_sleeping),
        ("/reset_prefix_cache", ["POST"], r.changing(r.reset_prefix_cache)),
        ("/update_weights", ["POST"], r.changing(r.update_weights)),
    ]


def _json(value: Any) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")


class _Routes:
    def __init__(self, backend: Backend | None) -> None:
        self._backend = cast("Backend", backend)
        self._life = cast("EngineLife", getattr(backend, "life", None))

    def changing(self, work: Handler) -> Handler:
        """`work` for administrators; what the state of the engine does not allow is a conflict."""

        async def run(request: Request) -> Response:
            caller, what = caller_of(request.scope), request.url.path
            if not self._backend.settings.admin_keys:
                raise HttpError(403, "admin-key", f"{what}: no one may", fix="start the server with --admin-key KEY")
            caller.need_admin(what)
            try:
                return await work(request)
            except ConfigError as e:
                raise HttpError(409, "engine-state", e.message, fix=e.fix) from e
            except CheckpointError as e:
                raise HttpError(400, e.code, e.message, fix=e.fix, field="path") from e

        return run

    async def _done(self) -> Response:
        return _json({"state": await self._life.state()})

    async def pause(self, request: Request) -> Response:
        await self._life.pause(**_asked(request, mode=MODES))  # type: ignore[arg-type]
        return await self._done()

    async def resume(self, request: Request) -> Response:
        _asked(request)
        await self._life.resume()
        return await self._done()

    async def sleep(self, request: Request) -> Response:
        asked = _asked(request, level=("1", "2"), mode=MODES)
        await self._life.sleep(int(asked.pop("level", "1")), **asked)  # type: ignore[arg-type]
        return await self._done()

    async def wake_up(self, request: Request) -> Response:
        _asked(request)
        await self._life.wake_up()
        return await self._done()

    async def reset_prefix_cache(self, request: Request) -> Response:
        _asked(request)
        await self._life.reset_prefix_cache()
        return await self._done()

    async def update_weights(self, request: Request) -> Response:
        _asked(request)
        async with self._backend.bodies.read(request) as body:
            r = await self._backend.workers.run(len(body), partial(parse, UpdateWeightsRequest), body)
        await self._life.update_weights(r.path, partial=r.partial)
        return await self._done()

    async def is_paused(self, request: Request) -> Response:
        return _json({"is_paused": await self._life.state() not in ("running", "finishing")})

    async def is_sleeping(self, request: Request) -> Response:
        return _json({"is_sleeping": await self._life.state() == "asleep"})


def _asked(request: Request, **known: tuple[str, ...]) -> dict[str, str]:
    """What stands behind the '?'. Raises InvalidParam for what is not known or stands there twice."""
    found: dict[str, str] = {}
    for name, value in request.query_params.multi_items():
        if name not in known or name in found:
            raise InvalidParam(name[:64], value[:64], f"one each of {', '.join(known) or 'nothing'}")
        if value not in known[name]:
            raise InvalidParam(name, value[:64], " or ".join(known[name]))
        found[name] = value
    return found

"""The application: a front, and replicas that are whole engines with the HTTP application of `lmkit serve`."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from lmkit.api import EngineDead, LmkitError
from lmkit.config import EngineConfig, from_dict, to_dict
from lmkit_http.body import Bodies
from lmkit_http.errors import error_response
from lmkit_http.limits import MOST_BODY
from lmkit_http.settings import ServerSettings
from ray import serve
from ray.exceptions import RayActorError
from ray.serve.config import AutoscalingConfig, RequestRouterConfig
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse

from lmkit_ray_serve.asgi import Asked, Head, call
from lmkit_ray_serve.router import PrefixRouter, beginning

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentHandle

log = logging.getLogger("lmkit.ray")

MOST_TOGETHER = 64 << 20  # bytes, bodies of all requests
TRIES = 3  # of a request that no replica has begun to answer
DRAIN_SECONDS = 30.0  # that a replica which goes gets for what it answers
DROPPED = (b"content-length", b"transfer-encoding", b"connection")  # the front has its own


class Replica:
    """One engine, in a process of its own beside this one, and its HTTP application."""

    async def __init__(self, config: Mapping[str, Any], settings: ServerSettings) -> None:  # type: ignore[misc]
        from lmkit_http.app import build_app
        from lmkit_python.llm import AsyncLLM

        self._llm = await AsyncLLM.start(from_dict(dict(config)))
        self._app = build_app(self._llm, settings)

    async def ask(self, scope: str, prompt: bytes, asked: Asked) -> AsyncIterator[Head | bytes]:
        """`scope` and `prompt` are for the router."""
        async for part in call(self._app, asked):
            yield part

    async def check_health(self) -> None:
        """Serve replaces a replica where this raises."""
        client = self._llm.client
        if client.ended:
            raise EngineDead(client.failure.message if client.failure is not None else "the engine is gone")


class Front:
    """Takes requests and passes on what replicas say. A replica that dies before it has begun to answer is no failure:
    another one is asked."""

    def __init__(self, replicas: DeploymentHandle, max_body: int) -> None:
        """`max_body`: bytes of a body that are passed on; what is of use is for a replica to say."""
        self._ask = replicas.options(stream=True, method_name="ask")
        self._bodies = Bodies(max_body, MOST_TOGETHER)

    async def __call__(self, request: Request) -> Response:
        try:
            async with self._bodies.read(request) as body:
                return await self._answer(request, bytes(body))
        except ClientDisconnect:
            return Response(status_code=499)
        except LmkitError as e:
            return error_response(e.info())

    async def _answer(self, request: Request, body: bytes) -> Response:
        client = (request.client.host, request.client.port) if request.client is not None else None
        asked = Asked(
            request.method, request.url.path, request.url.query.encode(), _plain(request.headers.raw), client, body
        )
        for _ in range(TRIES):
            answer = self._ask.remote(*beginning(asked.body), asked)
            try:
                status, headers = await anext(answer)
            except RayActorError as e:
                log.warning("a replica is gone: %s", type(e).__name__)
                continue
            response = StreamingResponse(_rest(answer), status_code=status)
            response.raw_headers = [(name, value) for name, value in headers if name.lower() not in DROPPED]
            return response
        return error_response(EngineDead("no replica answers").info(), retry_after=5.0)


def _plain(headers: Iterable[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """Headers for a body that was read here."""
    return [(name, value) for name, value in headers if name.lower() != b"content-encoding"]


async def _rest(answer: Any) -> AsyncIterator[bytes]:
    """Where a replica breaks off, so does this; where the client leaves, the replica is told."""
    try:
        async for part in answer:
            yield part
    finally:
        answer.cancel()


def application(
    config: EngineConfig,
    settings: ServerSettings | None = None,
    *,
    min_replicas: int = 1,
    max_replicas: int = 1,
    at_once: int = 64,
    drain_seconds: float = DRAIN_SECONDS,
) -> serve.Application:
    """For `serve.run`. Each replica takes `at_once` requests, and replicas are added while they have more than half of
    that, waiting ones included. A replica takes as many CPUs as it has threads."""
    threads = config.parallel.threads or 1
    replica = serve.deployment(
        Replica,
        name="lmkit",
        max_ongoing_requests=at_once,
        autoscaling_config=AutoscalingConfig(
            min_replicas=min_replicas, max_replicas=max(min_replicas, max_replicas),
            target_ongoing_requests=max(1, at_once // 2),
        ),
        request_router_config=RequestRouterConfig(request_router_class=PrefixRouter),
        graceful_shutdown_timeout_s=drain_seconds,
        graceful_shutdown_wait_loop_s=0.5,
        health_check_period_s=2,
        ray_actor_options={"num_cpus": threads},
    )  # fmt: skip
    front = serve.deployment(
        Front, name="front", max_ongoing_requests=at_once * max(min_replicas, max_replicas) * 4,
        graceful_shutdown_timeout_s=drain_seconds, ray_actor_options={"num_cpus": 0},
    )  # fmt: skip
    settings = settings or ServerSettings(served_names=config.model.names)
    return front.bind(replica.bind(to_dict(config), settings), settings.max_body or MOST_BODY)

"""The front: prompts to one server, answers from another."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from time import monotonic

import httpx
from lmkit.api import EngineBusy, ErrorInfo, LmkitError
from lmkit_http.body import Bodies
from lmkit_http.errors import error_response
from lmkit_http.limits import MOST_BODY
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from lmkit_split.prompts import prompt_only

log = logging.getLogger("lmkit.split")

MOST_TOGETHER = 64 << 20  # bytes, bodies of all requests
MOST_REQUESTS = 2048  # that are being answered
PAUSE = 10.0  # seconds for which a server that could not be reached is not asked
CONNECT_SECONDS = 2.0
HOP = frozenset(
    ("connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "te", "trailer", "transfer-encoding",
     "upgrade", "host", "content-length")
)  # fmt: skip
# of a request: its body is plain here, and whoever sent it was checked
READ_HERE = HOP | {"content-encoding", "origin"}
METHODS = ["GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "HEAD"]


@dataclass(eq=False)
class Server:
    """One server behind the front."""

    url: str
    running: int = 0
    resting: float = 0.0  # until when it is not asked

    def rest(self, why: Exception) -> None:
        log.warning("%s cannot be asked (%s); not again for %g s", self.url, type(why).__name__, PAUSE)
        self.resting = monotonic() + PAUSE


@dataclass
class Split:
    """Which servers there are, and how they are asked."""

    prefill: Sequence[Server]
    decode: Sequence[Server]
    min_bytes: int = 4096  # of a body whose prompt is computed elsewhere
    prefill_seconds: float = 60.0
    transport: httpx.AsyncBaseTransport | None = None
    client: httpx.AsyncClient = field(init=False)
    bodies: Bodies = field(default_factory=lambda: Bodies(MOST_BODY, MOST_TOGETHER))
    running: int = 0  # requests whose answers have not begun

    def __post_init__(self) -> None:
        timeout = httpx.Timeout(None, connect=CONNECT_SECONDS)
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=100)
        self.client = httpx.AsyncClient(timeout=timeout, limits=limits, transport=self.transport, trust_env=False)

    async def handle(self, request: Request) -> Response:
        """Raises nothing: errors are answers."""
        num = self.running + sum(server.running for server in (*self.prefill, *self.decode))
        if num >= MOST_REQUESTS:
            return error_response(EngineBusy(f"{num} requests are being answered", fix="try again in a while").info())
        self.running += 1
        try:
            async with self.bodies.read(request) as body:
                return await self._answer(request, bytes(body))
        except ClientDisconnect:
            return Response(status_code=499)
        except LmkitError as e:
            return error_response(e.info())
        finally:
            self.running -= 1

    async def _answer(self, request: Request, body: bytes) -> Response:
        headers = [(k, v) for k, v in request.headers.raw if k.decode("latin-1").lower() not in READ_HERE]
        if request.method == "POST" and len(body) >= self.min_bytes:
            await self._compute_prompt(request.url.path, body, headers)
        path = request.url.path + (f"?{request.url.query}" if request.url.query else "")
        for server in [*_free(self.decode), *_free(self.prefill)]:
            asked = self.client.build_request(request.method, server.url + path, content=body, headers=headers)
            server.running += 1
            try:
                answer = await self.client.send(asked, stream=True)
            except Exception as e:  # it has said nothing yet: another one may; a dying one raises not only httpx's own
                server.running -= 1
                server.rest(e)
                continue
            except BaseException:
                server.running -= 1
                raise
            kept = [(k.lower(), v) for k, v in answer.headers.raw if k.decode("latin-1").lower() not in HOP]
            response = StreamingResponse(_parts(server, answer), status_code=answer.status_code)
            response.raw_headers = kept
            return response
        return error_response(ErrorInfo("unreachable", "no server behind this address can be reached", status=502))

    async def _compute_prompt(self, path: str, body: bytes, headers: list[tuple[bytes, bytes]]) -> None:
        """Whatever comes of it, the answer is asked for next."""
        servers = _free(self.prefill)
        asked = await asyncio.to_thread(prompt_only, path, body) if servers else None
        if asked is None or not servers:
            return
        server = servers[0]
        server.running += 1
        try:
            timeout = httpx.Timeout(self.prefill_seconds, connect=CONNECT_SECONDS)
            await self.client.post(server.url + path, content=asked, headers=headers, timeout=timeout)
        except Exception as e:
            server.rest(e)
        finally:
            server.running -= 1


def _free(servers: Sequence[Server]) -> list[Server]:
    """Those that can be asked, the least busy first."""
    return sorted((s for s in servers if monotonic() >= s.resting), key=lambda s: s.running)


async def _parts(server: Server, answer: httpx.Response) -> AsyncIterator[bytes]:
    """The answer as it comes. Where it breaks off, so does this one."""
    try:
        async for part in answer.aiter_raw():
            yield part
    finally:
        server.running -= 1
        await answer.aclose()


def make_app(split: Split) -> Starlette:
    """The front as an ASGI application. It has no checks of keys and hosts: see `lmkit_http.bounded.gated`."""
    return Starlette(routes=[Route("/{path:path}", split.handle, methods=METHODS)])

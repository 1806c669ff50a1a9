"""What the server says of itself while it runs: a line for each request, and a line of figures every ten seconds.

Prompts and outputs are never part of it. Probes and scrapes, which would bury the rest, are lines of level debug.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING, Any

from lmkit.api import LmkitError, SchedStats
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lmkit_http.settings import OPEN_PATHS

if TYPE_CHECKING:
    from lmkit_http.backend import Backend

log = logging.getLogger("lmkit.access")
PROBES = OPEN_PATHS | {"/metrics", "/load"}
_PATH = 200  # characters of a path that a line shows
FIGURES_EVERY = 10.0  # seconds


class AccessLog:
    """ASGI: the outermost layer, so that what is refused before the routes leaves a line, too."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not log.isEnabledFor(logging.INFO):
            await self._app(scope, receive, send)
            return
        began, status = time.perf_counter(), 499  # as other servers write it when the client left before the answer

        async def watch(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, watch)
        finally:
            level = logging.DEBUG if scope["path"] in PROBES and status < 400 else logging.INFO
            who = (scope.get("client") or ("-",))[0]
            seconds = time.perf_counter() - began
            told = {"client": who, "method": scope["method"], "path": _shown(scope["path"]), "status": status,
                    "ms": round(1e3 * seconds)}  # fmt: skip
            log.log(level, "%(client)s %(method)s %(path)s %(status)d %(ms)d ms", told)


def _shown(path: str) -> str:
    """Nothing in a path may look like another line of the log."""
    text = path[:_PATH].encode("unicode_escape").decode()
    return text + "..." if len(path) > _PATH else text


async def figures(backend: Backend) -> None:
    """Logs what the engine did in the last ten seconds, when it did anything. Runs until it is cancelled."""
    before, at = SchedStats(), time.monotonic()
    while True:
        await asyncio.sleep(FIGURES_EVERY)
        try:
            now = (await backend.client.stats()).sched
        except LmkitError:
            continue  # the engine is being replaced, which is logged where it happens
        seconds, at = time.monotonic() - at, time.monotonic()
        if now.num_running or now.num_waiting or now.num_steps != before.num_steps:
            log.info("%s", line(before, now, seconds))
        before = now


def line(before: SchedStats, now: SchedStats, seconds: float) -> str:
    """Figures of the time between two looks. A new engine counts from 0: then they are those since its start."""

    def rate(name: str) -> float:
        old: Any = getattr(before, name)
        new: Any = getattr(now, name)
        return (new - old if new >= old else new) / max(seconds, 1e-9)

    usage = 1 - now.num_free_blocks / now.num_blocks if now.num_blocks else 0.0
    looked = rate("num_cache_queries")
    hits = rate("num_cached_tokens") / looked if looked else 0.0
    drafts = rate("num_drafts")
    guesses = f", guesses right {rate('num_accepted') / drafts:.0%}" if drafts else ""
    return (
        f"running {now.num_running}, waiting {now.num_waiting}, prompt {rate('num_prompt_tokens'):.1f} tok/s, "
        f"output {rate('num_output_tokens'):.1f} tok/s, KV {usage:.0%}, prefix hits {hits:.0%}{guesses}"
    )

"""Which requests end engines: found by trying those that ran at a death one at a time, and refused for a while.

Requests are known by a hash of what they ask, so that it does not matter who sends them again, and with which seed.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from hashlib import sha256
from time import monotonic
from typing import TYPE_CHECKING

import msgspec
from lmkit.api import EngineRequest, ErrorInfo, RequestError

if TYPE_CHECKING:
    from lmkit.engine.streams import EventStream

log = logging.getLogger("lmkit.engine")

HEALTHY_SECONDS = 600.0  # after which a death is forgotten
QUARANTINE_SECONDS = 600.0
DEATHS = 2  # at which the same request was running: it is the cause
MOST = 4096  # contents that are remembered

_encode = msgspec.msgpack.Encoder(order="deterministic").encode


class Quarantined(RequestError):
    """What this request asks was running whenever engines died."""

    code = "quarantined"

    def __init__(self, seconds: float) -> None:
        super().__init__(
            "engines have died of this request, it is refused for a while",
            fix=f"send another one, or this one again in {max(1, round(seconds))} s",
        )


def content_hash(request: EngineRequest) -> str:
    """Hashes all that may matter to the engine: not names, times, priorities and seeds."""
    params = replace(request.params, seed=None)
    asked = [request.token_ids, params, request.adapter, request.pooling, request.media]
    return sha256(_encode(asked)).hexdigest()[:16]


class Suspects:
    """What ran at deaths, and what has been found to be the cause."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[float, int, int]] = {}  # content -> time, its tokens, number of deaths
        self._refused: dict[str, float] = {}  # content -> until when

    def refusal(self, request: EngineRequest) -> ErrorInfo | None:
        """Why `request` must not run."""
        self._forget()
        if not self._refused:
            return None
        until = self._refused.get(content_hash(request))
        return None if until is None else Quarantined(until - monotonic()).info()

    def point(self, request: EngineRequest) -> int | None:
        """How many tokens `request` had when an engine died with it; None: it is under no suspicion."""
        self._forget()
        found = self._seen.get(content_hash(request)) if self._seen else None
        return found and found[1]

    def clear(self, request: EngineRequest) -> None:
        """It went on beyond the point where an engine had died."""
        self._seen.pop(content_hash(request), None)

    def blame(
        self, running: Sequence[EventStream], alone: EventStream | None, killed: bool = False
    ) -> list[EventStream]:
        """An engine died while these were running, `alone` being tried. Returns those that are the cause, now refused;
        when it is not clear who is, all are under suspicion.

        `killed`: from outside, perhaps by whoever wanted to and perhaps for lack of memory: one death more is needed.
        """
        again = [alone] if alone in running and alone is not None else []
        again = again or [stream for stream in running if self.point(stream.request) is not None]
        by_content: dict[str, list[EventStream]] = {}
        for stream in again or running:
            by_content.setdefault(content_hash(stream.request), []).append(stream)
        now, guilty = monotonic(), []
        for content, streams in by_content.items():
            num_deaths = self._seen[content][2] + 1 if content in self._seen else 1
            if num_deaths < (DEATHS + 1 if killed else DEATHS):
                self._seen[content] = (now, max(stream.num_tokens for stream in streams), num_deaths)
                continue
            del self._seen[content]
            self._refused[content] = now + QUARANTINE_SECONDS
            guilty += streams
            log.error(
                "request %s (content %s) was running at %d deaths of the engine and is refused for %g s",
                streams[0].id, content, num_deaths, QUARANTINE_SECONDS,
            )  # fmt: skip
        return guilty

    def _forget(self) -> None:
        if not (self._seen or self._refused):
            return
        now = monotonic()
        self._seen = {c: seen for c, seen in list(self._seen.items())[-MOST:] if now - seen[0] < HEALTHY_SECONDS}
        self._refused = {c: until for c, until in list(self._refused.items())[-MOST:] if now < until}

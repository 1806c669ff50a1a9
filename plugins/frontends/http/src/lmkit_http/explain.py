"""What an answer says of its own making, and the story of a request: from the history, as plain values."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from lmkit_http.access import Caller
from lmkit_http.errors import HttpError
from lmkit_http.history import Entry, History, Life
from lmkit_http.misses import Cache, cache_of

if TYPE_CHECKING:
    from lmkit_http.backend import Backend

HEADER = "x-lmkit-explain"  # of a request: what its answer is to say under the key `lmkit`
PARTS = ("usage", "cache")
_MOST = 8  # requests that are named as running meanwhile
_SHORT = 0.001  # seconds in the queue that nobody asks about


def wanted(headers: Mapping[str, str], several: bool = False) -> frozenset[str]:
    """The parts that a request wants explained. Raises HttpError for one that there is not, or not where `several`
    processes answer, of which each knows its own prompts only."""
    parts = frozenset(part.strip().lower() for part in headers.get(HEADER, "").split(",") if part.strip())
    if unknown := parts - set(PARTS):
        raise HttpError(
            400, "explain", f"{HEADER} knows no {sorted(unknown)[0][:64]!r}", fix=f"use {' or '.join(PARTS)}, or both"
        )
    if several and "cache" in parts:
        raise HttpError(
            400, "explain", f"{HEADER}: cache compares prompts, which several processes do not share",
            fix="start the server with --api-workers 1, or ask for usage alone",
        )  # fmt: skip
    return parts


def server_timing(lives: Sequence[Life]) -> str:
    """The header of that name (https://www.w3.org/TR/server-timing), in milliseconds. Of several turns the longest."""
    parts = {
        "queue": max((life.queued for life in lives), default=0.0),
        "prefill": max((life.prefill for life in lives), default=0.0),
        "decode": max((life.decode for life in lives), default=0.0),
        "total": max((life.total for life in lives), default=0.0),
    }
    return ", ".join(f"{name};dur={1e3 * seconds:.3f}" for name, seconds in parts.items())


def added(body: bytes, told: bytes) -> bytes:
    """The JSON object `body` with a key `lmkit` more; anything else as it is."""
    if not (body.startswith(b"{") and body.endswith(b"}")) or body == b"{}":
        return body
    return body[:-1] + b',"lmkit":' + told + b"}"


def told(backend: Backend, entry: Entry, parts: Iterable[str]) -> bytes:
    """JSON: what an answer says of itself. It compares prompts of the same tenant and salt only: what others asked is
    nobody's business, and whoever runs the server can ask for the story."""
    wants = set(parts)
    choices = []
    for life in entry.lives:
        choice: dict[str, Any] = {"index": life.index}
        if "usage" in wants:
            choice |= usage(life)
        if "cache" in wants:
            choice["cache"] = _cache(backend, life, Caller(False, tenant=entry.tenant))
        choices.append(choice)
    return msgspec.json.encode({"request_id": entry.request_id, "choices": choices})


def usage(life: Life) -> dict[str, Any]:
    """Counts of tokens, and seconds."""
    counts, started = life.usage, life.usage.started
    return {
        "usage": {
            "prompt_tokens": counts.prompt_tokens,
            "cached_tokens": counts.cached_tokens,
            "computed_tokens": counts.prompt_tokens - counts.cached_tokens,
            "completion_tokens": counts.completion_tokens,
            "reasoning_tokens": counts.reasoning_tokens,
            "draft_tokens": counts.draft_tokens,
            "accepted_draft_tokens": counts.accepted_tokens,
            "rejected_draft_tokens": counts.draft_tokens - counts.accepted_tokens,
        },
        "seconds": {
            "queue": round(life.queued, 6), "prefill": round(life.prefill, 6), "decode": round(life.decode, 6),
            "stalled": round(life.stalled, 6), "total": round(life.total, 6),
        },
        "prefill_steps": started.num_chunks if started is not None else 0,
        "preemptions": started.num_preempted if started is not None else 0,
    }  # fmt: skip


def story(backend: Backend, entry: Entry, caller: Caller) -> dict[str, Any]:
    """Everything that is known of a request, for whoever may see it."""
    return {
        "id": entry.id, "request_id": entry.request_id, "route": entry.route, "model": entry.model, "at": entry.at,
        "running": not entry.finished, "dropped_fields": entry.dropped,
        "choices": [_turn(backend, life, caller) for life in entry.lives],
    }  # fmt: skip


def _turn(backend: Backend, life: Life, caller: Caller) -> dict[str, Any]:
    rate = (life.usage.completion_tokens - 1) / life.decode if life.decode > 0 else None
    return {
        "index": life.index, "id": life.id, "adapter": life.adapter, "finish": life.finish, "error": life.error,
        **usage(life),
        "decode_tokens_per_second": round(rate, 2) if rate is not None else None,
        "cache": _cache(backend, life, caller),
        "waited_for": _meanwhile(
            backend.history, life, caller,
            lambda o: life.queued >= _SHORT and o.began < life.began and o.ended > life.submitted,
        ),
        "kept_waiting": _meanwhile(
            backend.history, life, caller,
            lambda o: o.queued >= _SHORT and life.began < o.began and life.ended > o.submitted,
        ),
    }  # fmt: skip


def _meanwhile(history: History, life: Life, caller: Caller, meets: Any) -> list[dict[str, Any]]:
    """Those turns that `meets`, at most a few, and how many more there are."""
    found = [other for other in _lives(history, caller) if other.id != life.id and other.submitted and meets(other)]
    shown = [
        {"id": o.id, "prompt_tokens": len(o.prompt), "completion_tokens": o.usage.completion_tokens}
        for o in found[:_MOST]
    ]
    return [*shown, {"more": len(found) - _MOST}] if len(found) > _MOST else shown


def _cache(backend: Backend, life: Life, caller: Caller) -> Cache:
    """Only administrators learn of prompts under another salt."""
    earlier = (
        other for other in _lives(backend.history, caller)
        if other.id != life.id and 0 < other.submitted <= life.submitted and (caller.admin or other.salt == life.salt)
    )  # fmt: skip
    return cache_of(life, earlier, backend.facts.block_size, backend.prefix_cache)


def _lives(history: History, caller: Caller) -> Iterator[Life]:
    for entry in history:
        if entry.seen_by(caller):
            yield from entry.lives


__all__ = ["HEADER", "PARTS", "added", "server_timing", "story", "told", "usage", "wanted"]

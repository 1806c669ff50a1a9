"""Which replica answers: the one that had the longest beginning of a prompt last, unless it is much busier."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from lmkit_python.replicas import Router
from ray.serve.request_router import FIFOMixin, PendingRequest, ReplicaID, RequestRouter, RunningReplica

MOST = 64  # replicas that are told apart; beyond, they share places
FIRST = ("system", "instructions", "tools", "messages", "prompt", "input")  # fields that prompts are made of


def beginning(body: bytes) -> tuple[str, bytes]:
    """Says what shares a cache with a request, and what its prompt is made of, in that order."""
    try:
        asked = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return "", b""
    if not isinstance(asked, dict):
        return "", b""
    scope = f"{asked.get('model')}/{asked.get('cache_salt')}"
    return scope, msgspec.json.encode([asked[name] for name in FIRST if name in asked])


class PrefixRouter(FIFOMixin, RequestRouter):
    """For deployments whose requests have, as the first two arguments, what `beginning` says."""

    def initialize_state(self, max_spans: int = 1 << 16) -> None:
        """Serve calls it once. `max_spans`: pieces of 128 bytes that are remembered."""
        self._router = Router(MOST, max_spans)
        self._places: dict[ReplicaID, int] = {}

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        if not candidate_replicas:
            return []
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True
        places = self._placed(candidate_replicas)
        scope, prompt = _prompt(pending_request)
        chosen = self._router.choose(prompt, scope, lambda place: self._load(places.get(place)))
        first = places.get(chosen) if chosen is not None else None
        if first is None:
            return [candidate_replicas]
        others = [replica for replica in candidate_replicas if replica is not first]
        return [[first], others] if others else [[first]]

    def _placed(self, replicas: Sequence[RunningReplica]) -> dict[int, RunningReplica]:
        """Replicas by their places. One that is gone gives its place to the next that comes."""
        live = {replica.replica_id for replica in replicas}
        self._places = {id: place for id, place in self._places.items() if id in live}
        free = (place for place in range(MOST) if place not in set(self._places.values()))
        for replica in replicas:
            if replica.replica_id not in self._places:
                self._places[replica.replica_id] = next(free, hash(replica.replica_id) % MOST)
        return {self._places[replica.replica_id]: replica for replica in replicas}

    def _load(self, replica: RunningReplica | None) -> int | None:
        return None if replica is None else self.replica_queue_len_cache.get(replica.replica_id) or 0


def _prompt(request: PendingRequest | None) -> tuple[str, bytes]:
    if request is None or len(request.args) < 2:
        return "", b""
    scope, prompt = request.args[:2]
    return scope, prompt

"""Registers the KV connector `events`."""

from __future__ import annotations

from collections.abc import Iterable

from lmkit.api import KVConnectorSpec, Tier, hookimpl


@hookimpl
def lmkit_kv_connectors() -> Iterable[KVConnectorSpec]:
    yield KVConnectorSpec(
        name="events",
        summary="Publishes which blocks the cache has, for routers; keeps nothing itself",
        target="lmkit_kv_connector_events.connector:Events",
        options="lmkit_kv_connector_events.options:Options",
        tier=Tier.PORTABLE,
        features=frozenset({"ranks"}),
    )

"""Registers the KV connector `redis`."""

from __future__ import annotations

from collections.abc import Iterable

from lmkit.api import KVConnectorSpec, Tier, hookimpl


@hookimpl
def lmkit_kv_connectors() -> Iterable[KVConnectorSpec]:
    yield KVConnectorSpec(
        name="redis",
        summary="All blocks, in a Redis or Valkey server",
        target="lmkit_kv_connector_redis.connector:RedisConnector",
        options="lmkit_kv_connector_redis.options:Options",
        tier=Tier.PORTABLE,
    )

"""Registers the KV connector `offload`."""

from __future__ import annotations

from collections.abc import Iterable

from lmkit.api import KVConnectorSpec, Tier, hookimpl


@hookimpl
def lmkit_kv_connectors() -> Iterable[KVConnectorSpec]:
    yield KVConnectorSpec(
        name="offload",
        summary="Blocks that the cache gives up, in memory of the host and on its disk",
        target="lmkit_kv_connector_offload.connector:Offload",
        options="lmkit_kv_connector_offload.options:Options",
        tier=Tier.PORTABLE,
    )

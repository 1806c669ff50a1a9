"""Registers the KV connector `shared`."""

from __future__ import annotations

from collections.abc import Iterable

from lmkit.api import KVConnectorSpec, Tier, hookimpl


@hookimpl
def lmkit_kv_connectors() -> Iterable[KVConnectorSpec]:
    yield KVConnectorSpec(
        name="shared",
        summary="All blocks, in files of a folder that several engines share",
        target="lmkit_kv_connector_shared.connector:Shared",
        options="lmkit_kv_connector_shared.options:Options",
        tier=Tier.PORTABLE,
    )

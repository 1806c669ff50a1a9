"""Registers the KV connector `tcp`."""

from __future__ import annotations

from collections.abc import Iterable

from lmkit.api import KVConnectorSpec, Tier, hookimpl


@hookimpl
def lmkit_kv_connectors() -> Iterable[KVConnectorSpec]:
    yield KVConnectorSpec(
        name="tcp",
        summary="Blocks of other engines, asked for over TCP, and its own for them",
        target="lmkit_kv_connector_tcp.connector:Tcp",
        options="lmkit_stores.peers:PeerOptions",
        tier=Tier.PORTABLE,
    )

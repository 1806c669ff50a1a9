"""Registers the KV connector `nixl`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from lmkit.api import KVConnectorSpec, Tier, hookimpl
from lmkit_stores.peers import PeerOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class Options(PeerOptions):
    """Options of kv_connector.nixl beside those of every connector with peers."""

    backend: str = "UCX"  # of NIXL: which of its plugins moves blocks; it must know memory of the host


@hookimpl
def lmkit_kv_connectors() -> Iterable[KVConnectorSpec]:
    yield KVConnectorSpec(
        name="nixl",
        summary="Blocks of other engines, read out of their memory by NIXL (RDMA, shared memory, TCP)",
        target="lmkit_kv_connector_nixl.connector:Nixl",
        options="lmkit_kv_connector_nixl.hooks:Options",
        requires=("nixl>=1.0,<2",),
        tier=Tier.OPTIMIZED,
        stability="experimental",
    )

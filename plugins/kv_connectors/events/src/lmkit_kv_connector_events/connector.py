"""The KV connector `events`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lmkit_stores.events import Publisher

from lmkit_kv_connector_events.options import Options

if TYPE_CHECKING:
    from lmkit.api import CachedBlock, Checkpoint, KVConfig, KVKey, ResolvedPlan


class Events:
    """Contract: lmkit.api.KVConnector. Saves no block and has none: it only tells what the engine's cache has."""

    def __init__(self, checkpoint: Checkpoint, resolved: ResolvedPlan, kv: KVConfig, **options: Any) -> None:
        chosen = Options(**options)
        sizes = [spec.block_size for spec in kv.specs]
        self.fingerprint = f"{checkpoint.path}@{checkpoint.revision}:{resolved.hash}:{sizes}"
        self.publisher = Publisher(
            chosen.address, sizes[0], topic=chosen.topic, replay=chosen.replay, replica=resolved.value("replica", 0)
        )

    def cached(self, block: CachedBlock) -> None:
        if block.key[0] == 0:
            self.publisher.stored(block)

    def evicted(self, key: KVKey) -> bool:
        if key[0] == 0:
            self.publisher.removed(key[1])
        return False

    def forget(self) -> None:
        self.publisher.cleared()

    def fetch(self, id: str, keys: Sequence[KVKey]) -> Mapping[KVKey, bytes]:
        return {}

    def computed(self, key: KVKey, parent: bytes, tokens: Sequence[int]) -> bool:
        return False

    def save(self, blocks: Sequence[tuple[KVKey, bytes]]) -> None:
        pass

    def release(self, id: str) -> None:
        pass

    def close(self) -> None:
        self.publisher.close()

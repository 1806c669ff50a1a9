"""The KV connector `offload`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from lmkit_stores import Folder, Memory, StoreConnector

from lmkit_kv_connector_offload.options import Options

if TYPE_CHECKING:
    from lmkit.api import Checkpoint, KVConfig, KVKey, ResolvedPlan


class Tiers:
    """Contract: lmkit_stores.Store. Memory, and behind it a folder."""

    def __init__(self, size: int, folder: Folder | None) -> None:
        self.folder = folder
        self.memory = Memory(size, self._spill)

    def _spill(self, key: KVKey, frame: bytes) -> None:
        if self.folder is not None and not self.folder.has(key):
            self.folder.write(key, frame)

    def read(self, keys: Sequence[KVKey]) -> Iterator[bytes | None]:
        for key in keys:
            frame = self.memory.get(key)
            if frame is None and self.folder is not None:
                frame = next(iter(self.folder.read([key])))
            yield frame

    def write(self, key: KVKey, frame: bytes) -> None:
        self.memory.write(key, frame)

    def has(self, key: KVKey) -> bool:
        return self.memory.has(key) or (self.folder is not None and self.folder.has(key))

    def drop(self, key: KVKey) -> None:
        self.memory.drop(key)
        if self.folder is not None:
            self.folder.drop(key)

    def close(self) -> None:
        """What is in memory is lost; files stay."""
        self.memory.close()


class Offload(StoreConnector):
    """Keeps the blocks whose place the cache gives to others."""

    def __init__(self, checkpoint: Checkpoint, resolved: ResolvedPlan, kv: KVConfig, **options: Any) -> None:
        chosen = Options(**options)
        folder = Folder(chosen.folder, chosen.disk << 20) if chosen.folder else None
        super().__init__(Tiers(chosen.host << 20, folder), checkpoint, resolved, kv, chosen, saves="evicted")

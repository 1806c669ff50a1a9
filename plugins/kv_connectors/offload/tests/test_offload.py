"""Memory of the host, and its disk behind it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lmkit_kv_connector_offload.connector import Tiers
from lmkit_stores import Folder
from lmkit_testing import KVConnectorConformance


class TestMemoryOnly(KVConnectorConformance):
    plugin = "kv_connector:offload"

    def test_only_what_is_evicted_is_saved(self, make: Any) -> None:
        connector = make()
        key = (0, b"a" * 32)
        assert not connector.computed(key, b"", [])
        assert connector.evicted(key)


class TestWithDisk(KVConnectorConformance):
    plugin = "kv_connector:offload"

    def options(self, tmp_path: Path) -> dict[str, Any]:
        return {"host": 1, "folder": str(tmp_path)}


def test_what_memory_gives_up_goes_to_disk(tmp_path: Path) -> None:
    tiers = Tiers(1000, Folder(str(tmp_path), 1 << 20))
    keys = [(0, bytes([i]) * 32) for i in range(10)]
    for i, key in enumerate(keys):
        tiers.write(key, bytes([i]) * 300)
    assert tiers.memory.nbytes <= 1000
    assert list(tiers.read(keys)) == [bytes([i]) * 300 for i in range(10)]
    assert [tiers.memory.has(key) for key in keys] == [False] * 7 + [True] * 3
    assert all(map(tiers.has, keys))


def test_without_disk_the_oldest_are_given_up() -> None:
    tiers = Tiers(1000, None)
    keys = [(0, bytes([i]) * 32) for i in range(10)]
    for key in keys:
        tiers.write(key, bytes(300))
    assert [tiers.has(key) for key in keys] == [False] * 7 + [True] * 3


def test_a_frame_larger_than_memory_is_given_up() -> None:
    tiers = Tiers(100, None)
    tiers.write((0, b"a" * 32), bytes(300))
    assert tiers.memory.nbytes == 0


def test_a_damaged_frame_is_removed_from_memory_and_disk(tmp_path: Path) -> None:
    """A frame that stays on disk would keep the right one in memory from being written there."""
    tiers, key = Tiers(1000, Folder(str(tmp_path), 1 << 20)), (0, bytes(32))
    tiers.write(key, b"damaged")
    tiers._spill(key, b"damaged")
    tiers.drop(key)
    assert not tiers.has(key)
    assert list(tiers.read([key])) == [None]

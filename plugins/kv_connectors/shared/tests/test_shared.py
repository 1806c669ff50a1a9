"""Files of a folder: shared, bounded, checked."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from lmkit.api import ConfigError
from lmkit_kv_connector_shared.options import Options
from lmkit_stores import Folder, opened, sealed
from lmkit_testing import KVConnectorConformance


class TestShared(KVConnectorConformance):
    plugin = "kv_connector:shared"

    def options(self, tmp_path: Path) -> dict[str, Any]:
        return {"folder": str(tmp_path / "kv")}

    def test_another_engine_finds_it(self, make: Any) -> None:
        from lmkit_testing.kv_connectors import settled

        one, other = make(), make()
        blocks = self.blocks(one, 10)
        one.save(blocks)
        assert settled(other, [key for key, _ in blocks]) == dict(blocks)


def test_a_folder_is_needed() -> None:
    with pytest.raises(ValueError, match="a path"):
        Options(folder="")


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="folder"):
        Folder(str(tmp_path / "file" / "kv"), 1 << 20)


def test_the_folder_stays_within_its_size(tmp_path: Path) -> None:
    """What was used last stays."""
    folder = Folder(str(tmp_path), 1 << 16)
    keys = [(0, bytes([i]) * 32) for i in range(200)]
    for i, key in enumerate(keys):
        folder.write(key, sealed(key, bytes(1000)))
        os.utime(folder._file(key), (i, i))
    held = [key for key in keys if folder.has(key)]
    total = sum(path.stat().st_size for path in tmp_path.rglob("*.kv"))
    assert total <= 1 << 16
    assert held == keys[-len(held) :]
    assert len(held) > 40


def test_files_belong_to_their_owner(tmp_path: Path) -> None:
    folder = Folder(str(tmp_path / "kv"), 1 << 20)
    folder.write((0, b"a" * 32), b"frame")
    (path,) = (tmp_path / "kv").rglob("*.kv")
    assert path.stat().st_mode & 0o77 == 0
    assert (tmp_path / "kv").stat().st_mode & 0o77 == 0


@pytest.mark.parametrize("change", ["cut", "longer", "byte", "other", "empty"])
def test_a_changed_file_is_left_out(tmp_path: Path, change: str) -> None:
    folder, key, other = Folder(str(tmp_path), 1 << 20), (0, b"a" * 32), (0, b"b" * 32)
    frame = sealed(key, bytes(range(100)))
    changed = {
        "cut": frame[:-1], "longer": frame + b"x", "byte": frame[:50] + b"!" + frame[51:],
        "other": sealed(other, bytes(range(100))), "empty": b"",
    }  # fmt: skip
    folder.write(key, frame)
    assert opened(key, next(iter(folder.read([key]))) or b"", 100) == bytes(range(100))
    folder.write(key, changed[change])
    found = next(iter(folder.read([key])))
    assert found is not None
    assert opened(key, found, 100) is None

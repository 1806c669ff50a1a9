"""Stores that are slow, fail, lie or disappear: requests go on, and their text is right."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from threading import Event
from typing import Any
from unittest.mock import patch

import pytest
from lmkit.api import KVConfig, KVKey
from lmkit_stores import Folder, Memory, StoreConnector, StoreOptions, connector, name_of, opened, sealed
from lmkit_testing.engines import no_checkpoint, no_plan
from lmkit_testing.hash_model import hash_kv
from lmkit_testing.kv_connectors import PATIENCE, WaitingTrial, fetched


class Bad(Memory):
    """A store that is right, but for what subclasses do to it."""

    def __init__(self) -> None:
        super().__init__(1 << 20)
        self.rng = random.Random(1)
        self.closed = Event()

    def close(self) -> None:
        super().close()
        self.closed.set()


class Hangs(Bad):
    """Never answers."""

    def read(self, keys: Sequence[KVKey]) -> Iterator[bytes | None]:
        self.closed.wait()
        yield None


class HangsInBetween(Bad):
    def read(self, keys: Sequence[KVKey]) -> Iterator[bytes | None]:
        for i, frame in enumerate(super().read(keys)):
            if i == 2:
                self.closed.wait()
            yield frame


class NeverWrites(Bad):
    def write(self, key: KVKey, frame: bytes) -> None:
        self.closed.wait()


class Raises(Bad):
    def read(self, keys: Sequence[KVKey]) -> Iterator[bytes | None]:
        for frame in super().read(keys):
            if self.rng.random() < 0.2:
                raise OSError("injected")
            yield frame


class IsFull(Bad):
    def write(self, key: KVKey, frame: bytes) -> None:
        raise OSError(28, "No space left on device")


class Lies(Bad):
    """About lengths, content, and which block it is; it gives too many and too few."""

    def read(self, keys: Sequence[KVKey]) -> Iterator[bytes | None]:
        before = None
        for frame in super().read(keys):
            told = frame
            if frame is not None:
                ways = [frame, frame, frame[:-8], frame + bytes(8), before, b"", frame[:40] + b"!!" + frame[42:], b"x"]
                told = self.rng.choice(ways)
                before = frame
            yield told
            if self.rng.random() < 0.05:
                return
        yield from [b"more"] * 3


class Endless(Bad):
    def read(self, keys: Sequence[KVKey]) -> Iterator[bytes | None]:
        yield from super().read(keys)
        while True:
            yield b"more"


class Disappears(Bad):
    calls = 0

    def read(self, keys: Sequence[KVKey]) -> Iterator[bytes | None]:
        self.calls += 1
        if self.calls > 3:
            raise ConnectionError("gone")
        yield from super().read(keys)


STORES = [Bad, Hangs, HangsInBetween, NeverWrites, Raises, IsFull, Lies, Endless, Disappears]


def make(store: type[Bad], kv: KVConfig, **options: Any) -> StoreConnector:
    chosen = StoreOptions(**{"seconds": 0.02, "pause": 0.0, **options})
    return StoreConnector(store(), no_checkpoint(), no_plan(), kv, chosen)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("seed", [35, 38, 60])
@pytest.mark.parametrize("store", STORES)
def test_no_token_changes(store: type[Bad], seed: int) -> None:
    trial = WaitingTrial(seed, lambda _, kv: make(store, kv))
    trial.run()
    trial.connector.close()


def test_a_lie_that_is_not_noticed_changes_tokens() -> None:
    """The trials would see it: without the checksum they fail."""

    def believed(key: KVKey, frame: bytes, size: int) -> bytes | None:
        return frame[32:] if len(frame) == 32 + size else None

    def all_of_them() -> None:
        for seed in range(30, 80):
            trial = WaitingTrial(seed, lambda _, kv: make(Lies, kv, seconds=5.0))
            try:
                trial.run()
            finally:
                trial.connector.close()

    with patch.object(connector, "opened", believed), pytest.raises(Exception, match=r"text of|faulty row"):
        all_of_them()


def test_a_store_that_hangs_is_left_alone() -> None:
    """One request waits; those that come after it do not."""
    one = make(Hangs, hash_kv(), seconds=0.05, pause=3600)
    keys = [(0, b"a" * 32)]
    assert one.fetch("first", keys) is None
    assert not fetched(one, "first", keys)
    assert one.fetch("second", keys) == {}
    assert not one.computed(keys[0], b"", [])
    one.close()


def test_all_readers_may_hang() -> None:
    one = make(Hangs, hash_kv(), seconds=0.05)
    for i in range(20):
        one.fetch(str(i), [(0, b"a" * 32)])
    for i in range(20):
        assert not fetched(one, str(i), [(0, b"a" * 32)])
    one.close()


def test_what_cannot_be_written_is_dropped_not_kept() -> None:
    """Memory for blocks under way is bounded."""
    one = make(NeverWrites, hash_kv(), memory=1)
    block = bytes(1 << 16)
    one.save([((0, bytes([i]) * 32), block) for i in range(100)])
    assert one._written <= 1 << 20
    assert one.num_dropped >= 100 - 16 - 1
    one.store.close()
    assert one.flush(PATIENCE)


def test_memory_for_what_was_read_is_bounded() -> None:
    kv = hash_kv(64, 1 << 12)  # blocks of 64 KiB
    one = make(Bad, kv, memory=1, seconds=5.0)
    blocks = [((0, bytes([i]) * 32), bytes(1 << 16)) for i in range(15)]
    one.save(blocks)
    assert one.flush(PATIENCE)
    keys = [key for key, _ in blocks]
    assert len(fetched(one, "alone", keys)) == 15
    for i in range(4):
        one.fetch(str(i), keys)
    found = [fetched(one, str(i), keys) for i in range(4)]
    assert all(list(each) == keys[: len(each)] for each in found), "what came is a beginning"
    assert one._held == 0
    one.close()


@pytest.mark.parametrize("size", [0, 1, 100])
def test_frames(size: int) -> None:
    key, content = (3, bytes(range(32))), bytes(i % 251 for i in range(size))
    frame = sealed(key, content)
    assert opened(key, frame, size) == content
    for i in range(len(frame)):
        assert opened(key, frame[:i] + bytes([frame[i] ^ 1]) + frame[i + 1 :], size) is None
        assert opened(key, frame[:i], size) is None
    assert opened((4, key[1]), frame, size) is None
    assert name_of(key) == "03" + key[1].hex()


@pytest.mark.parametrize("kind", ["memory", "folder"])
def test_a_damaged_frame_is_removed_and_written_again(kind: str, tmp_path: Path) -> None:
    """It would otherwise stay for ever: the store has it, so nobody writes it, and nobody can use it."""
    store = Memory(1 << 20) if kind == "memory" else Folder(str(tmp_path), 1 << 20)
    kv = hash_kv()
    connector = StoreConnector(store, no_checkpoint(), no_plan(), kv, StoreOptions())
    key, content = (0, b"k" * 32), bytes(kv.specs[0].bytes_per_block)
    try:
        store.write(key, sealed(key, content)[:-1])
        assert not connector.computed(key, b"", [])
        assert fetched(connector, "first", [key]) == {}
        assert connector.computed(key, b"", []), "the block is not wanted again"
        connector.save([(key, content)])
        assert connector.flush(PATIENCE)
        assert fetched(connector, "second", [key]) == {key: content}
    finally:
        connector.close()


def test_a_folder_that_vanishes_is_made_again(tmp_path: Path) -> None:
    folder, key = Folder(str(tmp_path / "a" / "kv"), 1 << 20), (0, b"k" * 32)
    folder.write(key, sealed(key, b"content"))
    shutil.rmtree(tmp_path / "a")
    assert not folder.has(key)
    assert list(folder.read([key])) == [None]
    folder.write(key, sealed(key, b"content"))
    assert list(folder.read([key])) == [sealed(key, b"content")]
    assert (tmp_path / "a" / "kv").stat().st_mode & 0o77 == 0

"""Engines that read one another's memory; arenas that are written over; peers that are dead, or say what is not so."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Iterator
from threading import Thread
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from lmkit.api import ConfigError
from lmkit_kv_connector_nixl.arena import Arena
from lmkit_kv_connector_nixl.connector import Nixl, Places
from lmkit_stores.wire import question, send_sized
from lmkit_testing import KVConnectorConformance
from lmkit_testing.engines import no_checkpoint, no_plan
from lmkit_testing.hash_model import hash_kv
from lmkit_testing.kv_connectors import WaitingTrial, fetched, settled

KV = hash_kv(64, 4)
BLOCKS = [((0, bytes([i]) * 32), bytes([i]) * 64) for i in range(20)]
KEYS = [key for key, _ in BLOCKS]
GIVER = """
import sys
from lmkit_kv_connector_nixl.connector import Nixl
from lmkit_testing.engines import no_checkpoint, no_plan
from lmkit_testing.hash_model import hash_kv
one = Nixl(no_checkpoint(), no_plan(), hash_kv(64, 4), listen="127.0.0.1:0", host=1)
one.save([((0, bytes([i]) * 32), bytes([i]) * 64) for i in range(20)])
assert one.flush(60)
print(one.server.address, flush=True)
sys.stdin.read()
"""  # another process, as engines are


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 40)), max_size=40))
def test_an_arena_holds_the_latest_frames_whole(writes: list[tuple[int, int]]) -> None:
    """Whatever is there is what was written, and of 100 bytes at least those are held that fit behind one another."""
    arena, written = Arena(100), OrderedDict[Any, bytes]()
    for number, (name, size) in enumerate(writes):
        key, frame = (0, bytes([name])), bytes([number + 1]) * size
        if not arena.has(key):
            written.pop(key, None)
            written[key] = frame
        arena.write(key, frame)
        assert arena.has(key)
        for each, found in zip(written, arena.read(list(written)), strict=True):
            assert found in (None, written[each])
            assert (arena.place(each)[1] > 0) == arena.has(each) == (found is not None)
        assert sum(len(written[each]) for each in written if arena.has(each)) <= 100
        held = [arena.has(each) for each in written]
        assert held == sorted(held), "an older one outlived a newer one"


def test_what_is_too_large_is_not_held() -> None:
    arena = Arena(100)
    arena.write((0, b"a"), b"x" * 60)
    arena.write((0, b"b"), b"x" * 101)
    assert [arena.has((0, name)) for name in (b"a", b"b")] == [True, False]


class TestNixl(KVConnectorConformance):
    plugin = "kv_connector:nixl"

    def options(self, tmp_path: Any) -> dict[str, Any]:
        return {"listen": "127.0.0.1:0", "host": 8}


def nixl(kv: Any = KV, **options: Any) -> Nixl:
    pytest.importorskip("nixl", reason='needs nixl: pip install "lmkit-kv-connector-nixl[nixl]"')
    return Nixl(no_checkpoint(), no_plan(), kv, **{"host": 1, "pause": 0, **options})


@pytest.fixture
def giver() -> Iterator[subprocess.Popen[str]]:
    pytest.importorskip("nixl", reason='needs nixl: pip install "lmkit-kv-connector-nixl[nixl]"')
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    process = subprocess.Popen([sys.executable, "-c", GIVER], text=True, **pipes)
    yield process
    process.kill()
    process.communicate()


def test_blocks_of_another_process_until_it_is_killed(giver: subprocess.Popen[str]) -> None:
    assert giver.stdout is not None
    address = giver.stdout.readline().strip()
    one = nixl(peers=address, seconds=20)
    assert settled(one, KEYS) == dict(BLOCKS)
    assert fetched(one, "part", [*KEYS[:5], (0, b"?" * 32), *KEYS[5:]]) == dict(BLOCKS[:5])
    giver.kill()
    giver.wait()
    assert not fetched(one, "again", KEYS)
    one.close()


def test_a_block_that_is_overwritten_is_left_out(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    """Between the answer and the reading other frames come to lie there."""
    giving = nixl(listen="127.0.0.1:0")
    giving.save(BLOCKS)
    assert giving.flush(60)
    assert giving.server is not None
    one = nixl(peers=giving.server.address, seconds=20)
    places = giving._arena.place
    monkeypatch.setattr(giving._arena, "place", lambda key: places((0, bytes([key[1][0] ^ 1]) * 32)))
    assert not fetched(one, "r", KEYS)
    assert "is not what was saved" in caplog.text
    monkeypatch.undo()
    assert settled(one, KEYS) == dict(BLOCKS)
    one.close()
    giving.close()


def test_a_peer_with_other_blocks_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    giving = nixl(listen="127.0.0.1:0")
    assert giving.server is not None
    one = nixl(hash_kv(64, 8), peers=giving.server.address)
    assert not fetched(one, "r", KEYS)
    assert "another model, dtype, block size or layout" in caplog.text
    one.close()
    giving.close()


RUBBISH = [
    b"\xc1\xc1",
    msgspec.msgpack.encode(Places(b"nobody", [(1, 96)])),
    msgspec.msgpack.encode(Places(b"nobody", [(4096, 96)] * len(KEYS))),
    msgspec.msgpack.encode(Places(b"nobody", [(4096, -1)] * len(KEYS))),
    msgspec.msgpack.encode(Places(b"nobody", [(4096, 1 << 40)] * len(KEYS))),
]


@pytest.mark.parametrize("answer", RUBBISH, ids=["unreadable", "too few", "no engine", "negative", "huge"])
def test_a_peer_that_talks_nonsense_costs_nothing_but_time(answer: bytes) -> None:
    pytest.importorskip("nixl", reason='needs nixl: pip install "lmkit-kv-connector-nixl[nixl]"')
    server = socket.create_server(("127.0.0.1", 0))

    def run() -> None:
        while True:
            try:
                peer, _ = server.accept()
                with peer:
                    peer.recv(len(Nixl.magic) + 32)
                    peer.sendall(b"\x01")
                    question(peer)
                    peer.sendall(len(KEYS).to_bytes(4, "little"))
                    question(peer)
                    send_sized(peer, answer)
            except (OSError, ValueError):
                if server.fileno() == -1:
                    return

    Thread(target=run, daemon=True).start()
    peers = f"127.0.0.1:{server.getsockname()[1]}"
    one = nixl(peers=peers, seconds=1)
    assert not fetched(one, "r", KEYS)
    one.close()
    server.close()


def test_the_text_of_every_request_is_right_beside_a_peer_that_is_gone() -> None:
    WaitingTrial(36, lambda _, kv: nixl(kv, peers="127.0.0.1:1", seconds=0.05)).run()


def test_nobody_to_talk_to() -> None:
    with pytest.raises(ConfigError, match="nobody to talk to"):
        nixl()


def test_a_backend_that_is_not_there() -> None:
    with pytest.raises(ConfigError, match="UCX"):
        nixl(listen="127.0.0.1:0", backend="CARRIERPIGEON")

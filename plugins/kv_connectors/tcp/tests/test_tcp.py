"""Two engines over a socket; peers that are dead, others, silent, or talk nonsense."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from threading import Thread
from typing import Any

import pytest
from lmkit.api import ConfigError
from lmkit_kv_connector_tcp.connector import Tcp
from lmkit_stores.peers import PeerOptions
from lmkit_stores.wire import FINGERPRINT
from lmkit_testing import KVConnectorConformance
from lmkit_testing.engines import no_checkpoint, no_plan
from lmkit_testing.hash_model import hash_kv
from lmkit_testing.kv_connectors import WaitingTrial, fetched, settled

KV = hash_kv(64, 4)
BLOCKS = [((0, bytes([i]) * 32), bytes([i]) * 64) for i in range(20)]
KEYS = [key for key, _ in BLOCKS]


class TestTcp(KVConnectorConformance):
    plugin = "kv_connector:tcp"

    def options(self, tmp_path: Any) -> dict[str, Any]:
        return {"listen": "127.0.0.1:0"}


def tcp(kv: Any = KV, **options: Any) -> Tcp:
    return Tcp(no_checkpoint(), no_plan(), kv, **options)


@pytest.fixture
def giver() -> Iterator[Tcp]:
    one = tcp(listen="127.0.0.1:0")
    yield one
    one.close()


@contextmanager
def asking(*peers: str, **options: Any) -> Iterator[Tcp]:
    one = tcp(peers=",".join(peers), **{"pause": 0, **options})
    try:
        yield one
    finally:
        one.close()


def address(one: Tcp) -> str:
    assert one.server is not None
    return one.server.address


def test_a_peer_gives_its_blocks(giver: Tcp) -> None:
    giver.save(BLOCKS)
    with asking(address(giver)) as other:
        assert settled(other, KEYS) == dict(BLOCKS)
        assert fetched(other, "part", [*KEYS[:5], (0, b"?" * 32), *KEYS[5:]]) == dict(BLOCKS[:5])
        assert not other.computed(KEYS[0], b"", [])  # it does not listen, so nobody will ask for them


def test_blocks_that_are_computed_and_not_yet_saved_are_waited_for(giver: Tcp) -> None:
    """An answer comes before its last blocks are written: whoever asks then must not miss them."""
    for key in KEYS:
        assert giver.computed(key, b"", [])
    with asking(address(giver)) as other:
        assert other.fetch("r", KEYS) is None
        giver.save(BLOCKS)
        assert fetched(other, "r", KEYS) == dict(BLOCKS)


def test_the_peer_that_has_most_is_asked(giver: Tcp) -> None:
    second = tcp(listen="127.0.0.1:0")
    try:
        giver.save(BLOCKS[:3])
        second.save(BLOCKS[:9])
        assert giver.flush(60)
        assert second.flush(60)
        with asking("127.0.0.1:1", address(giver), address(second)) as other:
            assert fetched(other, "r", KEYS) == dict(BLOCKS[:9])
    finally:
        second.close()


def test_a_peer_with_other_blocks_is_refused(giver: Tcp, caplog: pytest.LogCaptureFixture) -> None:
    giver.save(BLOCKS)
    assert giver.flush(60)
    one = tcp(hash_kv(64, 8), peers=address(giver))
    assert not fetched(one, "r", KEYS)
    assert "another model, dtype, block size or layout" in caplog.text
    one.close()


def test_a_peer_that_dies_between_two_questions(giver: Tcp) -> None:
    giver.save(BLOCKS)
    with asking(address(giver)) as other:
        assert settled(other, KEYS) == dict(BLOCKS)
        giver.close()
        assert fetched(other, "r", KEYS).items() <= dict(BLOCKS).items()
        assert not fetched(other, "again", KEYS)


def silent(peer: socket.socket) -> None:
    peer.recv(1 << 16)


def refuses(peer: socket.socket) -> None:
    peer.close()


def rubbish(peer: socket.socket) -> None:
    peer.sendall(b"\x01" + os.urandom(1 << 12))


def huge(peer: socket.socket) -> None:
    peer.recv(len(Tcp.magic) + FINGERPRINT)
    peer.sendall(b"\x01")
    peer.recv(1 << 16)
    peer.sendall(len(KEYS).to_bytes(4, "little"))
    peer.recv(1 << 16)
    peer.sendall((1 << 62).to_bytes(8, "little"))


def breaks_off(peer: socket.socket) -> None:
    peer.recv(len(Tcp.magic) + FINGERPRINT)
    peer.sendall(b"\x01")
    peer.recv(1 << 16)
    peer.sendall(len(KEYS).to_bytes(4, "little"))
    peer.recv(1 << 16)
    peer.sendall((96).to_bytes(8, "little") + b"half")
    peer.close()


@pytest.mark.parametrize("behave", [silent, refuses, rubbish, huge, breaks_off])
def test_a_peer_that_does_not_behave_costs_nothing_but_time(behave: Callable[[socket.socket], None]) -> None:
    """Its blocks are missing, and the text of every request is right."""
    server = socket.create_server(("127.0.0.1", 0))
    kept = []

    def run() -> None:
        while True:
            try:
                peer, _ = server.accept()
                kept.append(peer)
                behave(peer)
            except OSError:
                if server.fileno() == -1:
                    return

    Thread(target=run, daemon=True).start()
    port = server.getsockname()[1]
    with asking(f"127.0.0.1:{port}", seconds=0.05) as one:
        assert not fetched(one, "r", KEYS)
    WaitingTrial(36, lambda _, kv: tcp(kv, peers=f"127.0.0.1:{port}", seconds=0.05)).run()
    server.close()
    for peer in kept:
        peer.close()


@pytest.mark.parametrize("hello", [b"", b"GET / HTTP/1.1\r\n\r\n" + b" " * 64, Tcp.magic + b"0" * FINGERPRINT])
def test_strangers_are_sent_away(giver: Tcp, hello: bytes) -> None:
    host, _, port = address(giver).rpartition(":")
    with socket.create_connection((host, int(port))) as peer:
        peer.sendall(hello)
        with suppress(OSError):  # it may be gone by now, with our bytes unread
            peer.shutdown(socket.SHUT_WR)
            assert peer.recv(100) in (b"", b"\x00")


def test_questions_are_bounded(giver: Tcp) -> None:
    host, _, port = address(giver).rpartition(":")
    for question in (b"\xff\xff\xff\xff", b"\x04\x00\x00\x00\xc1\xc1\xc1\xc1"):
        with socket.create_connection((host, int(port))) as peer:
            peer.sendall(Tcp.magic + giver.fingerprint.encode())
            assert peer.recv(1) == b"\x01"
            peer.sendall(question)
            with suppress(ConnectionError):
                assert peer.recv(1) == b""


@pytest.mark.parametrize(
    ("options", "words"),
    [({"peers": "here"}, "HOST:PORT"), ({"listen": "127.0.0.1:99999"}, "HOST:PORT")],
)
def test_options(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        PeerOptions(**options)


def test_nobody_to_talk_to() -> None:
    with pytest.raises(ConfigError, match="nobody to talk to"):
        tcp()


def test_an_address_that_is_taken(giver: Tcp) -> None:
    with pytest.raises(ConfigError, match="nobody can listen"):
        tcp(listen=address(giver))

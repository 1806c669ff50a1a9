"""The KV connector `tcp`."""

from __future__ import annotations

import logging
import socket
from collections.abc import Iterator, Sequence
from contextlib import suppress
from threading import local
from time import monotonic
from typing import TYPE_CHECKING, Any

from lmkit.api import ConfigError
from lmkit_stores import StoreConnector

from lmkit_kv_connector_tcp.options import Options
from lmkit_kv_connector_tcp.server import Kept, Server
from lmkit_kv_connector_tcp.wire import MAGIC, MOST_FRAME, MOST_KEYS, ask, receive

if TYPE_CHECKING:
    from lmkit.api import Checkpoint, KVConfig, KVKey, ResolvedPlan

log = logging.getLogger("lmkit.kv")

CONNECT_SECONDS = 1.0


class Peer:
    """Another engine. A connection of each thread that asks; one that failed is left alone for a while."""

    def __init__(self, address: str, fingerprint: str, seconds: float, pause: float) -> None:
        self.address, self.fingerprint, self.seconds, self.pause = address, fingerprint, seconds, pause
        self._resting = 0.0
        self._mine = local()
        self._open: list[socket.socket] = []

    def _connection(self) -> socket.socket:
        peer: socket.socket | None = getattr(self._mine, "socket", None)
        if peer is None:
            host, _, port = self.address.rpartition(":")
            peer = socket.create_connection((host, int(port)), CONNECT_SECONDS)
            try:
                peer.settimeout(self.seconds)
                peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                peer.sendall(MAGIC + self.fingerprint.encode())
                if receive(peer, 1) != b"\x01":
                    raise ConnectionError("it runs another model, dtype, block size or layout")
            except BaseException:
                peer.close()
                raise
            self._mine.socket = peer
            self._open.append(peer)
        return peer

    def _hang_up(self) -> None:
        peer: socket.socket | None = getattr(self._mine, "socket", None)
        if peer is not None:
            peer.close()
            self._open.remove(peer)
            self._mine.socket = None

    def close(self) -> None:
        """Ends the connections of all threads."""
        for peer in self._open[:]:
            with suppress(OSError):
                peer.shutdown(socket.SHUT_RDWR)
            peer.close()

    def _failed(self, error: Exception) -> None:
        self._hang_up()
        if monotonic() >= self._resting:
            log.warning("the peer %s: %s; it is not asked for %g s", self.address, error or type(error), self.pause)
            self._resting = monotonic() + self.pause

    def count(self, keys: list[KVKey]) -> int:
        """How many of the first keys it has; 0 where it cannot be asked."""
        if monotonic() < self._resting:
            return 0
        for attempt in range(2):
            again = attempt == 0 and getattr(self._mine, "socket", None) is not None  # it may have ended since
            try:
                peer = self._connection()
                ask(peer, "count", keys)
                return min(int.from_bytes(receive(peer, 4), "little"), len(keys))
            except OSError as e:
                if not again:
                    self._failed(e)
                    return 0
                self._hang_up()
        return 0

    def get(self, keys: list[KVKey]) -> Iterator[bytes | None]:
        """Frames, until it fails: those after that are missing."""
        done = False
        try:
            peer = self._connection()
            ask(peer, "get", keys)
            for _ in keys:
                size = int.from_bytes(receive(peer, 8), "little")
                if size > MOST_FRAME:
                    raise ConnectionError(f"it sent a frame of {size} bytes")
                yield bytes(receive(peer, size)) if size else None
            done = True
        except OSError as e:
            self._failed(e)
            done = True
        finally:
            if not done:  # nobody wants the rest of what is on its way
                self._hang_up()


class Network:
    """Contract: lmkit_stores.Store. Its own blocks, and those of the peer that has most."""

    def __init__(self, kept: Kept, peers: Sequence[Peer]) -> None:
        self.kept, self.peers = kept, peers

    def read(self, keys: Sequence[KVKey]) -> Iterator[bytes | None]:
        keys = list(keys[:MOST_KEYS])
        own = next((i for i, key in enumerate(keys) if not self.kept.memory.has(key)), len(keys))
        yield from self.kept.memory.read(keys[:own])
        rest = keys[own:]
        if rest and self.peers:
            counts = [peer.count(rest) for peer in self.peers]
            best = max(counts)
            if best:
                yield from self.peers[counts.index(best)].get(rest[:best])

    def write(self, key: KVKey, frame: bytes) -> None:
        self.kept.write(key, frame)

    def has(self, key: KVKey) -> bool:
        return self.kept.memory.has(key)

    def close(self) -> None:
        self.kept.memory.close()
        for peer in self.peers:
            peer.close()


class Tcp(StoreConnector):
    """Asks peers for the blocks of a prompt, and keeps its own for peers where it listens."""

    def __init__(self, checkpoint: Checkpoint, resolved: ResolvedPlan, kv: KVConfig, **options: Any) -> None:
        chosen = Options(**options)
        if not chosen.listen and not chosen.addresses:
            raise ConfigError(
                "the KV connector tcp has nobody to talk to", fix="--kv-connector.tcp.listen, .peers, or both"
            )
        self.kept = Kept(chosen.host << 20)
        store = Network(self.kept, ())
        super().__init__(
            store, checkpoint, resolved, kv, chosen, saves="computed" if chosen.listen else "never"
        )  # fmt: skip
        store.peers = [Peer(address, self.fingerprint, chosen.seconds, chosen.pause) for address in chosen.addresses]
        self.server: Server | None = None
        if chosen.listen:
            try:
                self.server = Server(chosen.listen, self.fingerprint, self.kept)
            except Exception:
                super().close()
                raise

    def computed(self, key: KVKey, parent: bytes, tokens: Sequence[int]) -> bool:
        wanted = super().computed(key, parent, tokens)
        if wanted:
            self.kept.expect(key)
        return wanted

    def forget(self) -> None:
        super().forget()
        self.kept.clear_expected()

    def close(self) -> None:
        if self.server is not None:
            self.server.close()
        super().close()

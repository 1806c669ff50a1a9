"""Connectors that move blocks from engine to engine: who asks whom, and what is done where that fails."""

from __future__ import annotations

import logging
import socket
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from threading import local
from time import monotonic
from typing import TYPE_CHECKING, ClassVar

from lmkit.api import ConfigError

from lmkit_stores.asked import Answer, Kept, Server
from lmkit_stores.connector import Store, StoreConnector
from lmkit_stores.options import StoreOptions
from lmkit_stores.wire import MOST_KEYS, ask, receive

if TYPE_CHECKING:
    from lmkit.api import Checkpoint, KVConfig, KVKey, ResolvedPlan

log = logging.getLogger("lmkit.kv")

CONNECT_SECONDS = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerOptions(StoreOptions):
    """Beside those of every store."""

    listen: str = ""  # HOST:PORT at which other engines may ask for blocks; port 0: a free one
    peers: str = ""  # engines that are asked, HOST:PORT, several with commas between
    host: int = 1024  # MiB of memory for blocks that others may ask for

    def __post_init__(self) -> None:
        StoreOptions.__post_init__(self)
        for address in self.addresses + ([self.listen] if self.listen else []):
            host, _, port = address.rpartition(":")
            if not host or not port.isdecimal() or int(port) > 65535:
                raise ValueError(f"{address!r} is not HOST:PORT")
        if self.host < 1:
            raise ValueError(f"host is {self.host} MiB, needs at least 1")

    @property
    def addresses(self) -> list[str]:
        return [part.strip() for part in self.peers.split(",") if part.strip()]


class Peer(ABC):
    """Another engine. A connection of each thread that asks; one that failed is left alone for a while."""

    def __init__(self, address: str, greeting: bytes, options: PeerOptions) -> None:
        self.address, self.greeting, self.seconds, self.pause = address, greeting, options.seconds, options.pause
        self._resting = 0.0
        self._mine = local()
        self._open: list[socket.socket] = []

    def connection(self) -> socket.socket:
        """That of this thread. Raises OSError where there is none to be had."""
        peer: socket.socket | None = getattr(self._mine, "socket", None)
        if peer is None:
            host, _, port = self.address.rpartition(":")
            peer = socket.create_connection((host, int(port)), CONNECT_SECONDS)
            try:
                peer.settimeout(self.seconds)
                peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                peer.sendall(self.greeting)
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
                peer = self.connection()
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
            yield from self.frames(keys)
            done = True
        except OSError as e:
            self._failed(e)
            done = True
        finally:
            if not done:  # nobody wants the rest of what is on its way
                self._hang_up()

    @abstractmethod
    def frames(self, keys: list[KVKey]) -> Iterator[bytes | None]:
        """The frame of each key, by whatever moves them. Raises OSError where the peer fails."""


class Network:
    """Contract: lmkit_stores.Store. Its own blocks, and those of the peer that has most."""

    def __init__(self, kept: Kept) -> None:
        self.kept, self.peers = kept, list[Peer]()

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


class PeerConnector(StoreConnector, ABC):
    """Asks peers for the blocks of a prompt, and keeps its own for peers where it listens.

    A connector of this sort names itself, says what peers greet with, and how blocks get from one to the other.
    """

    name: ClassVar[str]
    magic: ClassVar[bytes]  # which connector, and which version of what is said

    def __init__(self, checkpoint: Checkpoint, resolved: ResolvedPlan, kv: KVConfig, options: PeerOptions) -> None:
        if not options.listen and not options.addresses:
            raise ConfigError(
                f"the KV connector {self.name} has nobody to talk to",
                fix=f"--kv-connector.{self.name}.listen, .peers, or both",
            )
        self.kept = Kept(self.memory(options.host << 20))
        network = Network(self.kept)
        super().__init__(
            network, checkpoint, resolved, kv, options, saves="computed" if options.listen else "never"
        )  # fmt: skip
        greeting = self.magic + self.fingerprint.encode()
        network.peers = [self.peer(address, greeting, options) for address in options.addresses]
        self.server: Server | None = None
        if options.listen:
            try:
                self.server = Server(options.listen, greeting, self.kept, self.answers())
            except Exception:
                super().close()
                raise

    @abstractmethod
    def memory(self, size: int) -> Store:
        """Where blocks for others lie, `size` bytes; it knows at once what it has."""

    @abstractmethod
    def peer(self, address: str, greeting: bytes, options: PeerOptions) -> Peer:
        """One that is asked."""

    @abstractmethod
    def answers(self) -> dict[str, Answer]:
        """What peers may ask beside "count"."""

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

"""The side that is asked for blocks by other engines."""

from __future__ import annotations

import logging
import socket
from collections import OrderedDict
from collections.abc import Callable
from threading import BoundedSemaphore, Condition, Thread
from time import monotonic
from typing import TYPE_CHECKING

from lmkit.api import ConfigError

from lmkit_stores.wire import question, receive

if TYPE_CHECKING:
    from lmkit.api import KVKey

    from lmkit_stores.connector import Store

Answer = Callable[[socket.socket, list["KVKey"]], None]  # sends what a question asks for

log = logging.getLogger("lmkit.kv")

MOST_PEERS = 64  # connections at once
IDLE_SECONDS = 600.0  # after which a connection that asks nothing is ended
COMING_SECONDS = 2.0  # that a question waits for blocks which a step has computed and nobody has written yet
COMING = 1 << 16  # blocks


class Kept:
    """Frames for others, and which of them are on their way: a prompt is answered before its blocks are saved."""

    def __init__(self, memory: Store) -> None:
        """`memory` knows at once what it has."""
        self.memory = memory
        self._coming: OrderedDict[KVKey, None] = OrderedDict()
        self._news = Condition()

    def expect(self, key: KVKey) -> None:
        with self._news:
            self._coming[key] = None
            if len(self._coming) > COMING:
                self._coming.popitem(last=False)

    def write(self, key: KVKey, frame: bytes) -> None:
        self.memory.write(key, frame)
        with self._news:
            self._coming.pop(key, None)
            self._news.notify_all()

    def clear_expected(self) -> None:
        with self._news:
            self._coming.clear()
            self._news.notify_all()

    def count(self, keys: list[KVKey]) -> int:
        """How many of the first keys it has, or will have soon."""
        until = monotonic() + COMING_SECONDS
        for i, key in enumerate(keys):
            with self._news:
                while key in self._coming and self._news.wait(max(0.0, until - monotonic())):
                    pass
            if not self.memory.has(key):
                return i
        return len(keys)


class Server:
    """Answers peers that greet with the same words, each in a thread of its own."""

    def __init__(self, address: str, greeting: bytes, kept: Kept, answers: dict[str, Answer]) -> None:
        """`answers` by what is asked. Raises ConfigError where nobody can listen at `address`."""
        self.kept, self.greeting, self.answers = kept, greeting, answers
        host, _, port = address.rpartition(":")
        try:
            self._socket = socket.create_server((host, int(port)))
        except OSError as e:
            raise ConfigError(f"nobody can listen for peers at {address}: {e}", fix="another HOST:PORT") from e
        self.address = "{}:{}".format(*self._socket.getsockname()[:2])
        self._room = BoundedSemaphore(MOST_PEERS)
        self._closed = False
        Thread(target=self._accept, name="lmkit-kv-listen", daemon=True).start()
        log.info("KV blocks for other engines at %s", self.address)

    def _accept(self) -> None:
        while not self._closed:
            try:
                peer, _ = self._socket.accept()
            except OSError:
                return
            if not self._room.acquire(blocking=False):
                peer.close()
                continue
            Thread(target=self._serve, args=(peer,), name="lmkit-kv-peer", daemon=True).start()

    def _serve(self, peer: socket.socket) -> None:
        try:
            with peer:
                peer.settimeout(IDLE_SECONDS)
                same = receive(peer, len(self.greeting)) == self.greeting
                peer.sendall(bytes([same]))
                while same and not self._closed:
                    asked = question(peer)
                    if asked.op == "count":
                        peer.sendall(self.kept.count(asked.keys).to_bytes(4, "little"))
                    elif asked.op in self.answers:
                        self.answers[asked.op](peer, asked.keys)
                    else:
                        raise ValueError(f"nobody answers {asked.op!r:.20}")
        except (OSError, ValueError) as e:
            log.debug("a peer is gone: %s", e)
        finally:
            self._room.release()

    def close(self) -> None:
        self._closed = True
        self._socket.close()

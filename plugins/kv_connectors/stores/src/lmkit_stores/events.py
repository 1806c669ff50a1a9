"""KV events: which blocks an engine's cache has, for routers outside. ZMQ PUB, MessagePack.

A message has three parts: b"kv-events"; a number that grows by one, 8 bytes, big-endian; and [seconds, [event, ...]] of

    ["BlockStored", [digest], parent digest, [token, ...], block size]    the first block's parent is that of its root
    ["BlockRemoved", [digest, ...]]
    ["AllBlocksCleared"]

Digests are 32 bytes. Events tell of the first KV group only. Who connects late has missed what was before.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from queue import Empty, SimpleQueue
from threading import Thread
from time import time
from typing import Any

import msgspec
from lmkit.api import ConfigError

TOPIC = b"kv-events"
LINGER = 200  # milliseconds for what is still to be sent at the end
MOST = 1000  # events of one message


class Publisher:
    """Sends what it is told from a thread of its own. Who reads too slowly misses events; the engine never waits."""

    def __init__(self, address: str, block_size: int) -> None:
        """Raises ConfigError where the address cannot be bound, or pyzmq is missing."""
        try:
            zmq: Any = import_module("zmq")
        except ImportError as e:
            raise ConfigError("KV events need pyzmq", fix='pip install "lmkit-stores[events]"') from e
        self._socket = zmq.Context.instance().socket(zmq.PUB)
        self._socket.setsockopt(zmq.LINGER, LINGER)
        try:
            self._socket.bind(address)
        except zmq.ZMQError as e:
            self._socket.close()
            raise ConfigError(f"KV events cannot be published at {address!r}: {e}", fix="tcp://HOST:PORT") from e
        self.address: str = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._block_size = block_size
        self._told: SimpleQueue[list[Any] | None] = SimpleQueue()
        self._thread = Thread(target=self._send_all, name="lmkit-kv-events", daemon=True)
        self._thread.start()

    def stored(self, digest: bytes, parent: bytes, tokens: Sequence[int]) -> None:
        self._told.put(["BlockStored", [digest], parent, list(tokens), self._block_size])

    def removed(self, digest: bytes) -> None:
        self._told.put(["BlockRemoved", [digest]])

    def cleared(self) -> None:
        self._told.put(["AllBlocksCleared"])

    def close(self) -> None:
        self._told.put(None)
        self._thread.join(1)

    def _send_all(self) -> None:
        number, event = 0, self._told.get()
        while event is not None:
            events = [event]
            try:
                while len(events) < MOST and (event := self._told.get_nowait()) is not None:
                    events.append(event)
            except Empty:
                pass
            parts = [TOPIC, number.to_bytes(8, "big"), msgspec.msgpack.encode([time(), events])]
            self._socket.send_multipart(parts)
            number += 1
            event = event and self._told.get()
        self._socket.close()

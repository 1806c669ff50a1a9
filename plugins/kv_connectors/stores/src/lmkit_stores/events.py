"""KV events: a stream that tells routers which blocks an engine has in its cache, as vLLM 0.32 publishes it.

Messages go out on a ZMQ PUB socket and have three parts: the topic (empty by default), a sequence number that grows by
one (8 bytes, big-endian), and a MessagePack array [seconds, [event, ...], data-parallel rank]. Each event is a map with
its class name under "type": BlockStored, BlockRemoved or AllBlocksCleared. Block hashes are the last 64 bits of a
digest, as unsigned integers; the first block of a prompt has no parent. Events tell of the first KV group only.

A subscriber that connects late, or that sees a gap in the sequence numbers, may ask the replay socket (ROUTER) for the
batches from a sequence number on: [sequence number] is answered by [topic, sequence number, batch] for each batch that
is still kept, then by ["", -1, ""].
"""

from __future__ import annotations

import errno
import logging
import re
from collections import deque
from importlib import import_module
from queue import Empty, SimpleQueue
from threading import Thread
from time import time
from typing import TYPE_CHECKING, Any

import msgspec
from lmkit.api import ConfigError

if TYPE_CHECKING:
    from lmkit.api import CachedBlock

log = logging.getLogger("lmkit.kv")

LINGER = 200  # milliseconds to send what is queued when the publisher closes
MAX_BATCH = 1000  # events of one message
MAX_QUEUED = 100_000  # events that wait for the thread, and messages that wait for a slow subscriber
MAX_REPLAYED = 10_000  # batches that are kept for replay
POLL = 0.1  # seconds between two looks at the replay socket while there are no events
MEDIUM = "GPU"  # vLLM's name for the engine's own cache, on every device
END = (-1).to_bytes(8, "big", signed=True)  # the sequence number that ends a replay


class BlockStored(msgspec.Struct, tag=True, omit_defaults=True):
    """A block can be found in the cache. `extra_keys` has what its hash depends on beside the tokens, one tuple for
    each block: the adapter's name, and for the first block the cache salt."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[str, ...] | None] | None = None


class BlockRemoved(msgspec.Struct, tag=True, omit_defaults=True):
    """Blocks were evicted from the cache."""

    block_hashes: list[int]
    medium: str | None


class AllBlocksCleared(msgspec.Struct, tag=True):
    """The cache is empty, or nothing may be assumed to be in it."""


class EventBatch(msgspec.Struct, array_like=True, omit_defaults=True):
    """The events of one message, with their time."""

    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


class Publisher:
    """Publishes events from a thread of its own, so that the engine never waits. Events that a full queue drops, or
    that a slow subscriber misses, show as a gap in the sequence numbers."""

    def __init__(self, address: str, block_size: int, *, topic: str = "", replay: str = "", replica: int = 0) -> None:
        """Binds `address` if it is one of this host, and connects to it otherwise (a router that listens); binds
        `replay`, if given. Engine `replica` of `--dp` adds its number to both ports, as vLLM does.

        Raises ConfigError where an address cannot be used, or pyzmq is missing.
        """
        try:
            zmq: Any = import_module("zmq")
        except ImportError as e:
            raise ConfigError("KV events need pyzmq", fix='pip install "lmkit-stores[events]"') from e
        self._zmq, self._block_size, self._replica, self._topic = zmq, block_size, replica, topic.encode()
        self._socket = self._open(zmq.PUB, with_offset(address, replica), "published", connect=True)
        self.address: str = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._replay: Any = None
        if replay:
            try:
                self._replay = self._open(zmq.ROUTER, with_offset(replay, replica), "replayed")
            except ConfigError:
                self._socket.close()
                raise
        self.replay_address = self._replay.getsockopt_string(zmq.LAST_ENDPOINT) if replay else ""
        self._sent: deque[tuple[int, bytes]] = deque(maxlen=MAX_REPLAYED if replay else 0)
        self._queue: SimpleQueue[BlockStored | BlockRemoved | AllBlocksCleared | None] = SimpleQueue()
        self._lost = False  # whether the full queue dropped events since the last message
        self._thread = Thread(target=self._send_all, name="lmkit-kv-events", daemon=True)
        self._thread.start()

    def _open(self, kind: int, address: str, what: str, *, connect: bool = False) -> Any:
        zmq = self._zmq
        socket = zmq.Context.instance().socket(kind)
        socket.setsockopt(zmq.LINGER, LINGER)
        socket.set_hwm(MAX_QUEUED)
        try:
            try:
                socket.bind(address)
            except zmq.ZMQError as e:
                if not connect or e.errno not in (errno.EADDRNOTAVAIL, errno.ENODEV):
                    raise
                socket.connect(address)
                log.info("%s is not an address of this host: KV events are sent to whoever listens there", address)
        except zmq.ZMQError as e:
            socket.close()
            raise ConfigError(
                f"KV events cannot be {what} at {address!r}: {e}",
                fix="give tcp://HOST:PORT with a free port, such as tcp://127.0.0.1:5557",
            ) from e
        return socket

    def stored(self, block: CachedBlock) -> None:
        """Announces a block of the first KV group."""
        first = block.parent is None
        extra = tuple(filter(None, (block.adapter, block.salt if first else None)))
        event = BlockStored(
            [short_hash(block.key[1])], None if block.parent is None else short_hash(block.parent), list(block.tokens),
            self._block_size, None, MEDIUM, block.adapter, [extra] if extra else None,
        )  # fmt: skip
        self._put(event)

    def removed(self, digest: bytes) -> None:
        """Announces that a block is no longer in the cache."""
        self._put(BlockRemoved([short_hash(digest)], MEDIUM))

    def cleared(self) -> None:
        """Announces that nothing announced before may be assumed to be in the cache."""
        self._put(AllBlocksCleared())

    def _put(self, event: BlockStored | BlockRemoved | AllBlocksCleared) -> None:
        if self._queue.qsize() < MAX_QUEUED:
            self._queue.put(event)
        else:
            self._lost = True

    def close(self) -> None:
        """Sends what is queued, for a second at most. Idempotent."""
        self._queue.put(None)
        self._thread.join(1)

    def _send_all(self) -> None:
        number = 0
        while (batch := self._next_batch()) is not None:
            if self._lost:  # a number that is never sent tells subscribers of the loss
                self._lost, number = False, number + 1
            if batch:
                data = msgspec.msgpack.encode(EventBatch(time(), batch, self._replica))
                self._sent.append((number, data))  # first: whoever has received a batch may ask for it again
                self._socket.send_multipart([self._topic, number.to_bytes(8, "big"), data])
                number += 1
            self._answer_replays()
        self._socket.close()
        if self._replay is not None:
            self._replay.close()

    def _next_batch(self) -> list[BlockStored | BlockRemoved | AllBlocksCleared] | None:
        """The events that wait, up to MAX_BATCH; none after POLL seconds without any; None: the publisher closes."""
        events: list[BlockStored | BlockRemoved | AllBlocksCleared] = []
        try:
            while len(events) < MAX_BATCH:
                event = self._queue.get_nowait() if events else self._queue.get(timeout=self._patience)
                if event is None:
                    if events:
                        self._queue.put(None)  # for the next call, after what is sent now
                        break
                    return None
                events.append(event)
        except Empty:
            pass
        return events

    @property
    def _patience(self) -> float | None:
        return POLL if self._replay is not None else None

    def _answer_replays(self) -> None:
        zmq = self._zmq
        while self._replay is not None and self._replay.poll(0):
            *route, start = self._replay.recv_multipart()
            if len(route) != 2 or len(start) != 8:
                log.warning("a replay request needs a sequence number of 8 bytes: it is ignored")
                continue
            since = int.from_bytes(start, "big")
            batches = [(self._topic, n.to_bytes(8, "big"), data) for n, data in self._sent if n >= since]
            for parts in [*batches, (b"", END, b"")]:
                try:
                    self._replay.send_multipart([*route, *parts], zmq.DONTWAIT)
                except zmq.ZMQError:  # gone, or too slow: it may ask again
                    break


def short_hash(digest: bytes) -> int:
    """The 64-bit number that stands for a block's digest in events."""
    return int.from_bytes(digest[-8:], "big")


def with_offset(address: str, replica: int) -> str:
    """`address` with `replica` added to its TCP port, or appended to the path of an ipc address."""
    if replica and address.startswith("tcp://"):
        return re.sub(r":([1-9]\d{0,4})$", lambda port: f":{int(port[1]) + replica}", address)
    return f"{address}_dp{replica}" if replica else address

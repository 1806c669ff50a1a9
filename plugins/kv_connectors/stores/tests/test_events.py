"""KV events: what is published is what the cache has, in messages that readers of vLLM's events understand."""

from __future__ import annotations

import time
from typing import Any

import msgspec
import pytest
from lmkit.api import CachedBlock, ConfigError
from lmkit_stores import Memory, StoreConnector, StoreOptions
from lmkit_stores.events import Publisher, short_hash, with_offset
from lmkit_testing.engines import no_checkpoint, no_plan
from lmkit_testing.hash_model import hash_kv
from lmkit_testing.kv_connectors import PATIENCE, WaitingTrial

zmq = pytest.importorskip("zmq", reason="pyzmq is not installed")


class VllmEvent(msgspec.Struct, tag=True, forbid_unknown_fields=True):
    """What vLLM 0.32 documents of its events, for reading them strictly."""


class BlockStored(VllmEvent):
    block_hashes: list[bytes | int]
    parent_block_hash: bytes | int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    ownership: str | None = None
    session_id: str | None = None


class BlockRemoved(VllmEvent):
    block_hashes: list[bytes | int]
    medium: str | None
    group_idx: int | None = None
    locality: str | None = None
    ownership: str | None = None


class AllBlocksCleared(VllmEvent):
    pass


class Batch(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


def block(digest: bytes, parent: bytes | None = None, tokens: list[int] | None = None, **more: Any) -> CachedBlock:
    return CachedBlock((0, digest), parent, tokens or [], more.get("adapter"), more.get("salt"))


def subscribed(publisher: Publisher) -> Any:
    """A socket that gets what `publisher` sends from now on."""
    listener = zmq.Context.instance().socket(zmq.SUB)
    listener.setsockopt(zmq.RCVHWM, 0)
    listener.setsockopt(zmq.RCVTIMEO, int(PATIENCE * 1000))
    listener.connect(publisher.address)
    listener.subscribe(b"")
    until = time.monotonic() + PATIENCE
    while not listener.poll(20):  # a subscription takes its time: what is sent before it has arrived is lost
        publisher.cleared()
        assert time.monotonic() < until
    return listener


@pytest.mark.parametrize("seed", range(35, 43))
def test_a_listener_knows_what_the_cache_has(seed: int) -> None:
    """Random trials; at the end the listener's blocks are those of the first group's pool."""
    listener: Any = None

    def make(rng: Any, kv: Any) -> StoreConnector:
        nonlocal listener
        options = StoreOptions(events="tcp://127.0.0.1:*")
        connector = StoreConnector(Memory(1 << 16), no_checkpoint(), no_plan(), kv, options)
        assert connector.events is not None
        listener = subscribed(connector.events)
        return connector

    trial = WaitingTrial(seed, make)
    connector = trial.connector
    assert isinstance(connector, StoreConnector)
    assert connector.events is not None
    trial.run()
    end = short_hash(b"end")
    connector.events.stored(block(b"end"))
    connector.close()
    held: dict[bytes | int, tuple[bytes | int | None, list[int]]] = {}
    numbers, forgot = [], False
    while end not in held:
        topic, number, data = listener.recv_multipart()
        assert topic == b""
        numbers.append(int.from_bytes(number, "big"))
        for event in msgspec.msgpack.decode(data, type=Batch).events:
            match event:
                case BlockStored(block_hashes=hashes, parent_block_hash=parent, token_ids=tokens, block_size=size):
                    assert size == trial.block_size
                    held |= dict.fromkeys(hashes, (parent, tokens))
                case BlockRemoved(block_hashes=hashes):
                    for name in hashes:
                        held.pop(name, None)  # after a failure it may have been forgotten
                case AllBlocksCleared():
                    forgot |= bool(held)  # after a failure, when some of it stays
                    held.clear()
    listener.close()
    assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
    del held[end]
    assert all(len(tokens) == trial.block_size for _, tokens in held.values())
    there = {short_hash(digest) for digest in trial.scheduler.groups[0].pool.hashes if digest is not None}
    assert set(held) <= there
    assert forgot or set(held) == there, "a block that nobody was told of"


def test_messages_are_those_of_vllm() -> None:
    publisher = Publisher("tcp://127.0.0.1:*", 2, topic="kv@host@demo", replica=0)
    listener = subscribed(publisher)
    while listener.poll(100):
        listener.recv_multipart()
    first, second = bytes(range(32)), bytes(range(32, 64))
    publisher.stored(block(first, None, [5, 6], adapter="poet", salt="s"))
    publisher.stored(block(second, first, [7, 8], adapter="poet", salt="s"))
    publisher.stored(block(second, first, [7, 8]))
    publisher.removed(second)
    publisher.close()
    events: list[Any] = []
    raw: list[Any] = []
    while len(events) < 4:
        topic, number, data = listener.recv_multipart()
        assert (topic, len(number)) == (b"kv@host@demo", 8)
        batch = msgspec.msgpack.decode(data, type=Batch)
        assert batch.data_parallel_rank == 0
        assert abs(batch.ts - time.time()) < 3600
        events += batch.events
        raw += msgspec.msgpack.decode(data)[1]
    one, two = int.from_bytes(first[-8:], "big"), int.from_bytes(second[-8:], "big")
    assert events == [
        BlockStored([one], None, [5, 6], 2, None, "GPU", "poet", [("poet", "s")]),
        BlockStored([two], one, [7, 8], 2, None, "GPU", "poet", [("poet",)]),
        BlockStored([two], one, [7, 8], 2, None, "GPU", None),
        BlockRemoved([two], "GPU"),
    ]
    named = {"type", "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name"}
    assert set(raw[2]) == named, "vLLM leaves optional fields out, and never the others"
    listener.close()


def test_missed_messages_are_replayed() -> None:
    publisher = Publisher("tcp://127.0.0.1:*", 1, replay="tcp://127.0.0.1:*")
    listener = subscribed(publisher)
    for i in range(5):
        publisher.stored(block(bytes([i]) * 32))
        while not any(isinstance(e, BlockStored) for e in received(listener)):
            pass
    asking = zmq.Context.instance().socket(zmq.DEALER)
    asking.setsockopt(zmq.RCVTIMEO, int(PATIENCE * 1000))
    asking.connect(publisher.replay_address)
    sent = dict(publisher._sent)
    last = max(sent)
    assert replayed(asking, (last - 1).to_bytes(8, "big")) == [(n, sent[n]) for n in (last - 1, last)]
    asking.send_multipart([b"", b"not eight bytes"])  # ignored, and the next one is answered
    assert [number for number, _ in replayed(asking, bytes(8))] == sorted(sent)
    for socket in (asking, listener):
        socket.close(linger=0)
    publisher.close()


def received(listener: Any) -> list[Any]:
    return msgspec.msgpack.decode(listener.recv_multipart()[2], type=Batch).events


def replayed(asking: Any, start: bytes) -> list[tuple[int, bytes]]:
    """What the replay socket sends from `start` on: (number, batch), up to the end."""
    asking.send_multipart([b"", start])
    batches = []
    while True:
        empty, topic, number, data = asking.recv_multipart()
        assert (empty, topic) == (b"", b"")
        if int.from_bytes(number, "big", signed=True) == -1:
            assert data == b""
            return batches
        batches.append((int.from_bytes(number, "big"), data))


def test_events_that_a_full_queue_drops_leave_a_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    publisher = Publisher("tcp://127.0.0.1:*", 1)
    listener = subscribed(publisher)
    before = listener.recv_multipart()[1]
    while listener.poll(100):
        before = listener.recv_multipart()[1]
    monkeypatch.setattr("lmkit_stores.events.MAX_QUEUED", 0)
    publisher.removed(b"lost" * 8)
    monkeypatch.undo()
    publisher.removed(b"sent" * 8)
    after = listener.recv_multipart()[1]
    assert int.from_bytes(after, "big") == int.from_bytes(before, "big") + 2
    publisher.close()
    listener.close()


def test_ports_of_the_engines_of_dp() -> None:
    assert with_offset("tcp://*:5557", 3) == "tcp://*:5560"
    assert with_offset("tcp://[::]:5557", 1) == "tcp://[::]:5558"
    assert with_offset("tcp://127.0.0.1:*", 3) == "tcp://127.0.0.1:*"
    assert with_offset("tcp://127.0.0.1:0", 3) == "tcp://127.0.0.1:0"
    assert with_offset("ipc:///run/kv", 1) == "ipc:///run/kv_dp1"
    assert with_offset("tcp://*:5557", 0) == "tcp://*:5557"


@pytest.mark.parametrize(
    "options", [{"events": "tcp://nowhere"}, {"events": "tcp://127.0.0.1:*", "events_replay": "x"}]
)
def test_an_address_that_is_none(options: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=r"cannot be (published|replayed) at"):
        StoreConnector(Memory(1), no_checkpoint(), no_plan(), hash_kv(), StoreOptions(**options))


def test_a_topic_without_an_address_is_refused() -> None:
    with pytest.raises(ValueError, match="need events"):
        StoreOptions(events_topic="kv")

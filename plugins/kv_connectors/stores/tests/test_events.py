"""KV events: what is published is what the cache has."""

from __future__ import annotations

import time
from typing import Any

import msgspec
import pytest
from lmkit.api import ConfigError
from lmkit_stores import Memory, StoreConnector, StoreOptions
from lmkit_testing.engines import no_checkpoint, no_plan
from lmkit_testing.hash_model import hash_kv
from lmkit_testing.kv_connectors import PATIENCE, WaitingTrial

zmq = pytest.importorskip("zmq", reason="pyzmq is not installed")


@pytest.mark.parametrize("seed", range(35, 43))
def test_a_listener_knows_what_the_cache_has(seed: int) -> None:
    """Random trials; at the end the listener's blocks are those of the first group's pool."""
    listener = zmq.Context.instance().socket(zmq.SUB)
    listener.setsockopt(zmq.RCVHWM, 0)
    listener.setsockopt(zmq.RCVTIMEO, int(PATIENCE * 1000))

    def make(rng: Any, kv: Any) -> StoreConnector:
        options = StoreOptions(events="tcp://127.0.0.1:*")
        one = StoreConnector(Memory(1 << 16), no_checkpoint(), no_plan(), kv, options)
        assert one.events is not None
        one.events._socket.setsockopt(zmq.SNDHWM, 0)
        listener.connect(one.events.address)
        listener.subscribe(b"")
        return one

    trial = WaitingTrial(seed, make)
    connector = trial.connector
    assert isinstance(connector, StoreConnector)
    assert connector.events is not None
    until = time.monotonic() + PATIENCE
    while not listener.poll(20):  # a subscription takes its time: what is sent before it came is lost
        connector.events.cleared()
        assert time.monotonic() < until
    trial.run()
    connector.events.stored(b"end", b"", [])
    connector.close()
    held: dict[bytes, tuple[bytes, list[int]]] = {}
    numbers, forgot = [], False
    while b"end" not in held:
        topic, number, data = listener.recv_multipart()
        assert topic == b"kv-events"
        numbers.append(int.from_bytes(number, "big"))
        _, events = msgspec.msgpack.decode(data)
        for event in events:
            match event:
                case ["BlockStored", digests, parent, tokens, size]:
                    assert size == trial.block_size
                    held |= dict.fromkeys(digests, (parent, tokens))
                case ["BlockRemoved", digests]:
                    for digest in digests:
                        held.pop(digest, None)  # after a failure it may have been forgotten
                case ["AllBlocksCleared"]:
                    forgot |= bool(held)  # after a failure, when some of it stays
                    held.clear()
    listener.close()
    assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
    del held[b"end"]
    assert all(len(tokens) == trial.block_size for _, tokens in held.values())
    there = set(filter(None, trial.scheduler.groups[0].pool.hashes))
    assert set(held) <= there
    assert forgot or set(held) == there, "a block that nobody was told of"


def test_an_address_that_is_none() -> None:
    with pytest.raises(ConfigError, match="cannot be published"):
        StoreConnector(
            Memory(1), no_checkpoint(), no_plan(), hash_kv(),
            StoreOptions(events="tcp://nowhere"),
        )  # fmt: skip

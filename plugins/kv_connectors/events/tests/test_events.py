"""The connector `events`: what it publishes is what the cache has, and engines of `--dp` do not collide."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from lmkit_kv_connector_events.connector import Events
from lmkit_testing import KVConnectorConformance
from lmkit_testing.engines import no_checkpoint, no_plan
from lmkit_testing.hash_model import hash_kv

zmq = pytest.importorskip("zmq", reason="pyzmq is not installed")


class TestEvents(KVConnectorConformance):
    plugin = "kv_connector:events"
    keeps_blocks = False

    def options(self, tmp_path: Any) -> dict[str, Any]:
        return {"address": "tcp://127.0.0.1:*"}


def test_each_engine_of_dp_publishes_at_a_port_of_its_own() -> None:
    first = Events(no_checkpoint(), no_plan(), hash_kv(), address="tcp://127.0.0.1:*")
    port = int(first.publisher.address.rpartition(":")[2])
    first.close()
    second = Events(no_checkpoint(), no_plan().for_replica(2), hash_kv(), address=f"tcp://127.0.0.1:{port}")
    try:
        assert second.publisher.address == f"tcp://127.0.0.1:{port + 2}"
        assert second.publisher._replica == 2
    finally:
        second.close()


def test_a_router_that_listens_is_connected_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """An address of another host cannot be bound. Here every address is refused as such once."""
    listener = zmq.Context.instance().socket(zmq.SUB)
    listener.setsockopt(zmq.RCVTIMEO, 60_000)
    listener.subscribe(b"")
    port = listener.bind_to_random_port("tcp://127.0.0.1")

    def refuse(self: Any, address: str) -> None:
        raise zmq.ZMQError(zmq.ENODEV if hasattr(zmq, "ENODEV") else 19)

    with monkeypatch.context() as patch:
        patch.setattr(zmq.Socket, "bind", refuse)
        connector = Events(no_checkpoint(), no_plan(), hash_kv(), address=f"tcp://127.0.0.1:{port}", topic="kv@x")
    try:
        while True:  # what is sent before the subscription has arrived is lost
            connector.forget()
            if listener.poll(50):
                break
        topic, _, data = listener.recv_multipart()
        assert topic == b"kv@x"
        assert msgspec.msgpack.decode(data)[1][0] == {"type": "AllBlocksCleared"}
    finally:
        connector.close()
        listener.close()

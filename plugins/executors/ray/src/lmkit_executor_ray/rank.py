"""A rank where Ray has put it. What it is told and says goes over a socket of its own, as on one host: Ray starts it,
knows whether it lives, and ends it."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from multiprocessing.connection import Client, Connection

import msgspec
import psutil
from lmkit_multiproc.messages import Load, decode_order
from lmkit_multiproc.rank import Rank

from lmkit_executor_ray.about import about


class RankActor:
    """Its methods take and give plain values and bytes only."""

    def __init__(self, rank: int, environment: Mapping[str, str]) -> None:
        """`environment`: what the platform wants; torch has not been imported yet."""
        os.environ.update(environment)
        self._rank = rank
        self._met: list[object] = []  # kept while this process lives

    def about(self, load: bytes) -> bytes:
        """What this process would load with, see `About`."""
        import ray

        order = decode_order(load)
        assert isinstance(order, Load)
        node, address = ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address()
        if (interface := _interface_of(address)) is not None:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)  # a host's own name may be that of its loopback
        return msgspec.msgpack.encode(about(node, address, order.resolved, order.checkpoint))

    def memory(self) -> str:
        """A file without a name that other ranks on this host can open while this process lives."""
        fd = os.memfd_create("lmkit-ranks")
        self._met.append(fd)
        return f"file:///proc/{os.getpid()}/fd/{fd}"

    def port(self, address: str) -> str:
        """Where other ranks on any host can find this one. What listens there is the server that torch's rendezvous
        takes for its own in this process: a port that was only looked up may be another's by then."""
        from torch.distributed import TCPStore

        store = TCPStore(address, 0, is_master=True, wait_for_workers=False, multi_tenant=True)
        self._met.append(store)
        return f"tcp://{address}:{store.port}"

    def follow(self, address: str, port: int, secret: bytes, here: int) -> None:
        """Does what it is told from there, until nobody is there any more. `here`: ranks on this node."""
        os.environ["LOCAL_WORLD_SIZE"] = str(here)
        with Client((address, port), family="AF_INET", authkey=secret) as connection:
            at_once(connection)
            connection.send_bytes(str(self._rank).encode())
            assert isinstance(connection, Connection)
            Rank(self._rank, connection).run()


def at_once(connection: Connection) -> None:
    """Sends each frame as soon as it is there: two frames follow one another, and nothing answers the first."""
    with socket.socket(fileno=os.dup(connection.fileno())) as same:
        same.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _interface_of(address: str) -> str | None:
    for name, addresses in psutil.net_if_addrs().items():
        if any(found.address == address for found in addresses):
            return name
    return None

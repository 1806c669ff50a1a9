"""The KV connector `tcp`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lmkit_stores import Memory
from lmkit_stores.peers import Peer, PeerConnector, PeerOptions
from lmkit_stores.wire import MOST_FRAME, ask, receive_sized, send_sized

if TYPE_CHECKING:
    import socket
    from collections.abc import Iterator

    from lmkit.api import Checkpoint, KVConfig, KVKey, ResolvedPlan
    from lmkit_stores.asked import Answer


class Sender(Peer):
    """A peer that sends frames over the connection on which it is asked."""

    def frames(self, keys: list[KVKey]) -> Iterator[bytes | None]:
        peer = self.connection()
        ask(peer, "get", keys)
        for _ in keys:
            yield bytes(receive_sized(peer, MOST_FRAME)) or None


class Tcp(PeerConnector):
    """Blocks over the connections on which engines ask for them. To "get", the answer is for each name the length of
    its frame (8 bytes, 0: there is none), and the frame."""

    name = "tcp"
    magic = b"lmkit kv tcp 1\n"

    def __init__(self, checkpoint: Checkpoint, resolved: ResolvedPlan, kv: KVConfig, **options: Any) -> None:
        super().__init__(checkpoint, resolved, kv, PeerOptions(**options))

    def memory(self, size: int) -> Memory:
        return Memory(size)

    def peer(self, address: str, greeting: bytes, options: PeerOptions) -> Sender:
        return Sender(address, greeting, options)

    def answers(self) -> dict[str, Answer]:
        return {"get": self._send}

    def _send(self, peer: socket.socket, keys: list[KVKey]) -> None:
        for frame in self.kept.memory.read(keys):
            send_sized(peer, frame or b"")

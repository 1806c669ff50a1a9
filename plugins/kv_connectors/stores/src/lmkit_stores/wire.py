"""What two engines say to each other.

The asking side sends its connector's greeting and its fingerprint (32 hex digits); the other answers one byte, 1: the
same, or 0, and ends. Then questions, each a length (4 bytes, little-endian) and MessagePack [op, names]. To "count" the
answer is how many of the first names there are, without a gap, in 4 bytes. How blocks get from one to the other is the
connector's own.
"""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from lmkit.api import KVKey

FINGERPRINT = 32  # bytes
MOST_KEYS = 1 << 16  # of one question
MOST_QUESTION = 64 * MOST_KEYS  # bytes
MOST_FRAME = 1 << 30  # bytes


class Question(msgspec.Struct, array_like=True):
    op: str
    keys: list[tuple[int, bytes]]


_decoder = msgspec.msgpack.Decoder(Question)


class Ended(ConnectionError):
    """The other side has ended the connection."""


def receive(peer: socket.socket, n: int) -> bytearray:
    """Exactly `n` bytes. Raises Ended, or TimeoutError."""
    data = bytearray(n)
    view = memoryview(data)
    while view:
        got = peer.recv_into(view)
        if not got:
            raise Ended("the connection ended")
        view = view[got:]
    return data


def receive_sized(peer: socket.socket, most: int) -> bytearray:
    """What comes behind its length (8 bytes). Raises as `receive`, and ConnectionError above `most` bytes."""
    size = int.from_bytes(receive(peer, 8), "little")
    if size > most:
        raise ConnectionError(f"it sent {size} bytes")
    return receive(peer, size)


def send_sized(peer: socket.socket, data: bytes) -> None:
    """`data` behind its length."""
    peer.sendall(len(data).to_bytes(8, "little"))
    peer.sendall(data)


def ask(peer: socket.socket, op: str, keys: list[KVKey]) -> None:
    """Sends a question."""
    data = msgspec.msgpack.encode(Question(op, keys))
    peer.sendall(len(data).to_bytes(4, "little") + data)


def question(peer: socket.socket) -> Question:
    """Raises Ended, ValueError (msgspec.ValidationError included) for what is none, or TimeoutError."""
    size = int.from_bytes(receive(peer, 4), "little")
    if size > MOST_QUESTION:
        raise ValueError(f"a question of {size} bytes")
    found = _decoder.decode(receive(peer, size))
    if len(found.keys) > MOST_KEYS:
        raise ValueError(f"a question for {len(found.keys)} blocks")
    return found

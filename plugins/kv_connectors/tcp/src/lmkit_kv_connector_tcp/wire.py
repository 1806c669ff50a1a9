"""What two engines say to each other.

The asking side sends MAGIC and its fingerprint (32 hex digits); the other answers one byte, 1: the same, or 0, and
ends. Then questions, each a length (4 bytes, little-endian) and MessagePack [op, names]:

    "count"   how many of the first names it has, without a gap: 4 bytes
    "get"     for each name the length of its frame (8 bytes, 0: it has none), and the frame
"""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from lmkit.api import KVKey

MAGIC = b"lmkit kv tcp 1\n"
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


def ask(peer: socket.socket, op: str, keys: list[KVKey]) -> None:
    data = msgspec.msgpack.encode(Question(op, keys))
    peer.sendall(len(data).to_bytes(4, "little") + data)


def question(peer: socket.socket) -> Question:
    """Raises Ended, ValueError (msgspec.ValidationError included) for what is none, or TimeoutError."""
    size = int.from_bytes(receive(peer, 4), "little")
    if size > MOST_QUESTION:
        raise ValueError(f"a question of {size} bytes")
    found = _decoder.decode(receive(peer, size))
    if len(found.keys) > MOST_KEYS or found.op not in ("count", "get"):
        raise ValueError(f"a question {found.op!r:.20} for {len(found.keys)} blocks")
    return found

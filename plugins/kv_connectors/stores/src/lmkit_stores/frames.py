"""Frames: a block as it is stored. `opened(sealed(x)) == x`, and anything else that comes back is noticed.

8 bytes  b"lmkitKV1"
8 bytes  length of the content, little-endian
16 bytes XXH3-128 of key and content
content
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from xxhash import xxh3_128

if TYPE_CHECKING:
    from lmkit.api import KVKey

MAGIC = b"lmkitKV1"
HEADER = 32  # bytes


def name_of(key: KVKey) -> str:
    """What a store calls a block: letters and digits, the same on every host."""
    group, digest = key
    return f"{group:02x}{digest.hex()}"


def sealed(key: KVKey, content: bytes) -> bytes:
    """The frame of a block."""
    return b"".join((MAGIC, len(content).to_bytes(8, "little"), _checksum(key, content), content))


def opened(key: KVKey, frame: bytes, size: int) -> bytes | None:
    """The content of `size` bytes; None where the frame is not that of `key`, is cut off, or was changed."""
    content = frame[HEADER:]
    if frame[:8] != MAGIC or len(content) != size or int.from_bytes(frame[8:16], "little") != size:
        return None
    return content if frame[16:HEADER] == _checksum(key, content) else None


def _checksum(key: KVKey, content: bytes) -> bytes:
    h = xxh3_128(name_of(key).encode())
    h.update(content)
    return h.digest()

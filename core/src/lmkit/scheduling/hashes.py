"""Names of KV content. Equal digests mean equal KV, so whatever changes the KV enters: nothing else shares blocks.

root  = H(model fingerprint, KV dtype, adapter, tenant salt)        one per request
block = H(digest of the block before, token ids, media in it)       SHA-256, 32 bytes
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import sha256

from lmkit.api import MediaItem
from lmkit.scheduling.request import Request


def root_hash(fingerprint: str, kv_dtype: str, adapter: str | None, salt: str | None) -> bytes:
    """Parent of a request's first block. An absent part differs from an empty one."""
    h = sha256(b"lmkit kv 1")
    for part in (fingerprint, kv_dtype, adapter, salt):
        data = b"" if part is None else part.encode()
        h.update((-1 if part is None else len(data)).to_bytes(8, "little", signed=True))
        h.update(data)
    return h.digest()


def block_hash(parent: bytes, tokens: Sequence[int], media: bytes = b"") -> bytes:
    """Digest of one whole block. Token ids are below 2**32; a block always has the same number of them."""
    return sha256(parent + array("I", tokens).tobytes() + media).digest()


def media_bytes(media: Sequence[MediaItem], start: int, end: int) -> bytes:
    """What the media items that touch positions [start, end) add to that block's digest."""
    parts = []
    for item in media:
        if item.start < end and start < item.start + item.num_tokens:
            parts.append(len(item.hash).to_bytes(4, "little") + item.hash)
            parts.append((start - item.start).to_bytes(8, "little", signed=True))
    return b"".join(parts)


def end_hash(r: Request, num_tokens: int, block_size: int) -> bytes:
    """Digest of the first `num_tokens` tokens: of their last whole block, or one that no whole block has."""
    whole = num_tokens // block_size
    hashes, start = extend_hashes(r, whole, block_size), whole * block_size
    parent = hashes[whole - 1] if whole else r.root_hash
    if start == num_tokens:
        return parent
    media = media_bytes(r.media, start, num_tokens) if r.media else b""
    return block_hash(b"end" + parent, r.tokens[start:num_tokens], media)


def extend_hashes(r: Request, num_blocks: int, block_size: int) -> list[bytes]:
    """r.block_hashes, with at least the first `num_blocks` whole blocks of r.tokens. Each block is hashed once."""
    hashes = r.block_hashes
    parent = hashes[-1] if hashes else r.root_hash
    for i in range(len(hashes), num_blocks):
        start, end = i * block_size, (i + 1) * block_size
        media = media_bytes(r.media, start, end) if r.media else b""
        parent = block_hash(parent, r.tokens[start:end], media)
        hashes.append(parent)
    return hashes

"""Codes of a few bits in 32-bit words."""

from __future__ import annotations

import torch
from torch import Tensor

BITS = (2, 3, 4, 8)
AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)  # the column that each code of a word belongs to, lowest bits first
_SLICE = 1 << 16  # words taken apart at a time where codes straddle them


def unpack(words: Tensor, bits: int) -> Tensor:
    """Words [n, w] of int32, or of bytes, -> their codes [n, w * 32 / bits] uint8: a stream of bits, lowest first.

    Three words hold 32 codes of three bits. w is a multiple of 3 then.
    """
    assert bits in BITS, bits
    if bits == 3:
        return _straddling(words, bits)
    data = words.contiguous().view(torch.uint8)  # processors that torch runs on are little-endian
    if bits == 8:
        return data
    mask = (1 << bits) - 1
    codes = torch.stack([(data >> shift) & mask for shift in range(0, 8, bits)], -1)
    return codes.flatten(1)


def _straddling(words: Tensor, bits: int) -> Tensor:
    """Any number of bits: each code from the word that it begins in and the next."""
    n, width = words.shape
    length = width * 32 // bits
    first = torch.arange(length, device=words.device) * bits
    word, shift = first // 32, first % 32
    codes = torch.empty((n, length), dtype=torch.uint8, device=words.device)
    step = max(1, _SLICE // max(width, 1))
    for rows in (slice(at, at + step) for at in range(0, n, step)):
        wide = words[rows].to(torch.int64) & 0xFFFFFFFF
        following = wide[:, (word + 1).clamp(max=width - 1)] << 32
        codes[rows] = ((wide[:, word] | following) >> shift) & ((1 << bits) - 1)
    return codes


def unpack_awq(words: Tensor) -> Tensor:
    """int32 words [n, w] of 4 bits -> their codes [n, 8 w] uint8, columns in order."""
    codes = unpack(words, 4).unflatten(1, (-1, 8))
    places = [AWQ_COLUMNS.index(column) for column in range(8)]
    return codes[..., places].flatten(1)


def pack_fours(codes: Tensor) -> Tensor:
    """Codes [n, k] uint8 of 4 bits -> bytes [n, k / 2], of which `unpack` makes them again."""
    return codes[:, ::2] | codes[:, 1::2] << 4

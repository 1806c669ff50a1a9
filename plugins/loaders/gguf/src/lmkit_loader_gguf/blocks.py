"""Blocks of quantized numbers, as `ggml-common.h` lays them out, and what they stand for.

Every type is codes with a scale, and perhaps an offset, for each group of numbers: w = value(code) * scale - offset.
What `dequantize` gives is that of `gguf.quants.dequantize`, bit by bit: products of scales are exact in float32, and so
are products with codes; only the difference is rounded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)  # kvalues_iq4nl
E2M1 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)  # twice the value


@dataclass(slots=True)
class Blocks:
    """codes [n, k], or what they stand for, less `zero`, times scales [n, groups], less offsets [n, groups] if any."""

    codes: Tensor  # uint8
    scales: Tensor  # float32
    offsets: Tensor | None = None
    zero: int = 0
    table: tuple[int, ...] = ()  # what codes stand for; (): themselves

    def values(self) -> Tensor:
        """[n, k] int16: codes, or what they stand for, less `zero`."""
        if self.table:
            return torch.tensor(self.table, dtype=torch.int16, device=self.codes.device)[self.codes.long()]
        return self.codes.to(torch.int16) - self.zero

    def dequantize(self) -> Tensor:
        """[n, k] float32."""
        n, groups = self.scales.shape
        if self.table:
            values = torch.tensor(self.table, dtype=torch.float32, device=self.codes.device)
            weight = values.index_select(0, self.codes.flatten().int())
        else:
            weight = self.codes.float().sub_(self.zero)
        weight = weight.view(n, groups, -1).mul_(self.scales[..., None])
        if self.offsets is not None:
            weight -= self.offsets[..., None]
        return weight.view(n, -1)


def halves(data: Tensor, at: int) -> Tensor:
    """The float16 at byte `at` of each block: [n, blocks] float32."""
    return data[..., at : at + 2].contiguous().view(torch.float16)[..., 0].float()


def nibbles(data: Tensor, run: int) -> Tensor:
    """Codes of 4 bits: of each `run` bytes the low halves, then the high ones."""
    parts = data.unflatten(-1, (-1, run))
    return torch.cat((parts & 15, parts >> 4), -1).flatten(-2)


def bits(data: Tensor, width: int, run: int) -> Tensor:
    """Codes of 1 or 2 bits: of each `run` bytes the lowest, then those above, and so on."""
    parts = data.unflatten(-1, (-1, run))
    return torch.cat([parts >> shift & ((1 << width) - 1) for shift in range(0, 8, width)], -1).flatten(-2)


def q4_0(data: Tensor) -> Blocks:
    return _flat(nibbles(data[..., 2:], 16), halves(data, 0), zero=8)


def q4_1(data: Tensor) -> Blocks:
    return _flat(nibbles(data[..., 4:], 16), halves(data, 0), -halves(data, 2))


def q5_0(data: Tensor) -> Blocks:
    return _flat(nibbles(data[..., 6:], 16) | _fifth(data[..., 2:6]), halves(data, 0), zero=16)


def q5_1(data: Tensor) -> Blocks:
    return _flat(nibbles(data[..., 8:], 16) | _fifth(data[..., 4:8]), halves(data, 0), -halves(data, 2))


def q8_0(data: Tensor) -> Blocks:
    return _flat(data[..., 2:] ^ 128, halves(data, 0), zero=128)


def q2_k(data: Tensor) -> Blocks:
    both, d, least = data[..., :16], halves(data, 80), halves(data, 82)
    scales, offsets = (both & 15).float() * d[..., None], (both >> 4).float() * least[..., None]
    return _flat(bits(data[..., 16:80], 2, 32), scales, offsets)


def q3_k(data: Tensor) -> Blocks:
    low, high = data[..., 96:104], data[..., 104:108]
    six = torch.cat((low & 15, low >> 4), -1) | (bits(high, 2, 4) << 4)
    scales = (six.float() - 32) * halves(data, 108)[..., None]
    codes = bits(data[..., 32:96], 2, 32) | bits(data[..., :32], 1, 32) << 2
    return _flat(codes, scales, zero=4)


def q4_k(data: Tensor) -> Blocks:
    return _flat(nibbles(data[..., 16:], 32), *_scales_and_offsets(data))


def q5_k(data: Tensor) -> Blocks:
    return _flat(nibbles(data[..., 48:], 32) | bits(data[..., 16:48], 1, 32) << 4, *_scales_and_offsets(data))


def q6_k(data: Tensor) -> Blocks:
    codes = nibbles(data[..., :128], 64) | bits(data[..., 128:192], 2, 32) << 4
    scales = data[..., 192:208].contiguous().view(torch.int8).float() * halves(data, 208)[..., None]
    return _flat(codes, scales, zero=32)


def iq4_nl(data: Tensor) -> Blocks:
    return _flat(nibbles(data[..., 2:], 16), halves(data, 0), table=IQ4)


def iq4_xs(data: Tensor) -> Blocks:
    high, low = data[..., 2:4], data[..., 4:8]
    two = torch.stack([high >> shift & 3 for shift in range(0, 8, 2)], -1).flatten(-2)
    six = torch.stack((low & 15, low >> 4), -1).flatten(-2) | two << 4
    scales = (six.float() - 32) * halves(data, 0)[..., None]
    return _flat(nibbles(data[..., 8:], 16), scales, table=IQ4)


def mxfp4(data: Tensor) -> Blocks:
    exponents = data[..., 0].int() - 128  # scales are half of it: E2M1 has twice the values
    scales = torch.ldexp(torch.ones_like(exponents, dtype=torch.float32), exponents)
    return _flat(nibbles(data[..., 1:], 16), scales, table=E2M1)


UNPACK: dict[str, Callable[[Tensor], Blocks]] = {
    "Q4_0": q4_0, "Q4_1": q4_1, "Q5_0": q5_0, "Q5_1": q5_1, "Q8_0": q8_0, "Q2_K": q2_k, "Q3_K": q3_k, "Q4_K": q4_k,
    "Q5_K": q5_k, "Q6_K": q6_k, "IQ4_NL": iq4_nl, "IQ4_XS": iq4_xs, "MXFP4": mxfp4,
}  # fmt: skip


def unpack(name: str, data: Tensor, rows: int, block_bytes: int) -> Blocks:
    """Bytes of whole rows as the codes, scales and offsets of those. data: uint8, [rows * bytes of one]."""
    return UNPACK[name](data.view(rows, -1, block_bytes))


def _flat(
    codes: Tensor, scales: Tensor, offsets: Tensor | None = None, zero: int = 0, table: tuple[int, ...] = ()
) -> Blocks:
    """Blocks of a row one after another: [n, blocks, ...] -> [n, ...]."""
    return Blocks(codes.flatten(1), scales.flatten(1), None if offsets is None else offsets.flatten(1), zero, table)


def _fifth(data: Tensor) -> Tensor:
    """The fifth bit of 32 codes is bit i of four bytes, little-endian."""
    shifts = torch.arange(8, dtype=torch.uint8, device=data.device)
    return (data[..., None] >> shifts & 1).flatten(-2) << 4


def _scales_and_offsets(data: Tensor) -> tuple[Tensor, Tensor]:
    """Those of Q4_K and Q5_K: eight of 6 bits each in twelve bytes, whose last four hold the low halves of four."""
    a, b, low = data[..., 4:8], data[..., 8:12], data[..., 12:16]
    scales = torch.cat((a & 63, (low & 15) | a >> 6 << 4), -1).float() * halves(data, 0)[..., None]
    offsets = torch.cat((b & 63, low >> 4 | b >> 6 << 4), -1).float() * halves(data, 2)[..., None]
    return scales, offsets

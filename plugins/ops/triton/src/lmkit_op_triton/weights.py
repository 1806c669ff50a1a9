"""Weights as the kernels of linears and of experts read them: a linear is a single expert of one part."""

from __future__ import annotations

import struct
from dataclasses import dataclass

import torch
from lmkit.api import Integers
from lmkit_layouts import FloatFormat, Floats
from torch import Tensor
from torch.nn import functional as F

# What the codes of 4-bit floats (E2M1) stand for in `Integers`: twice the number, and 12.
E2M1 = (12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0)
WHOLE, BYTES, FLOAT4 = range(3)  # what codes are: integers, places in a table, 4-bit floats
SHIFT = 256.0  # how much the kernels shrink a float8 number; packed scales make up for it


@dataclass(frozen=True, slots=True)
class StackedExperts:
    """[experts * parts * n, k]: gate and up of each expert one after another, or its only part."""

    weight: Tensor
    experts: int
    parts: int
    n: int

    @property
    def k(self) -> int:
        return self.weight.shape[1]

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes


@dataclass(frozen=True, slots=True)
class StackedCodes:
    """Integers: see `lmkit.api.Integers`. Scales, zeros and offsets are [experts, parts, groups, n].

    codes [experts * parts * n, bytes]. Of four bits, each `half` columns and the `half` after them share their bytes;
    rows are filled up to whole pairs of halves, which no activation meets.
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor | None
    offsets: Tensor | None
    zero: int  # where there are no zeros
    table: tuple[int, int] | None  # its bytes, the first in the low bits
    kind: int  # WHOLE, BYTES or FLOAT4
    bits: int
    group: int
    half: int
    experts: int
    parts: int
    n: int
    k: int
    order: Tensor | None = None  # [k] int64: the columns of x as the codes stand; None: in order

    @property
    def nbytes(self) -> int:
        parts = (self.codes, self.scales, self.zeros, self.offsets, self.order)
        return sum(part.nbytes for part in parts if part is not None)


def stacked(found: Integers, bits: int, group: int, experts: int, parts: int, n: int) -> StackedCodes:
    """Integers as the kernels read them. Scales and offsets become float16."""
    half, k = half_of(group), found.codes.shape[1]
    codes = F.pad(found.codes, (0, -k % (2 * half)))
    if bits == 4:
        low, high = codes.unflatten(1, (-1, 2, half)).unbind(2)
        codes = (low | (high << 4)).flatten(1)

    def turned(values: Tensor) -> Tensor:
        return values.view(experts, parts, n, -1).transpose(2, 3).contiguous()

    table, kind, zero = None, WHOLE, found.zeros
    if found.table is not None:
        looked_up = found.table.tolist()
        kind = FLOAT4 if tuple(looked_up) == E2M1 and isinstance(zero, int) and zero == E2M1[0] else BYTES
        table = struct.unpack("<2q", bytes(looked_up))
    zeros = zero if isinstance(zero, Tensor) else None
    return StackedCodes(
        codes.contiguous(), turned(found.scales.half()), None if zeros is None else turned(zeros),
        None if found.offsets is None else turned(found.offsets.half()), zero if isinstance(zero, int) else 0,
        table, kind, bits, group, half, experts, parts, n, k, found.order,
    )  # fmt: skip


def half_of(group: int) -> int:
    """Columns that are multiplied at once: all of one group. 0: they fit no tensor core."""
    return next((half for half in (64, 32, 16) if group % half == 0), 0)


@dataclass(frozen=True, slots=True)
class StackedBytes:
    """codes [experts * parts * n, k] int8, or float8 e4m3 in the bytes of one.

    `rows` of them and `group` columns share a scale (0: all columns): scales [experts * parts * n / rows, groups]
    float32; those of float8 that is widened in registers are times SHIFT.
    """

    codes: Tensor
    scales: Tensor
    rows: int
    group: int
    experts: int
    parts: int
    n: int

    @property
    def k(self) -> int:
        return self.codes.shape[1]

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scales.nbytes


def stacked_floats(found: Floats, experts: int, parts: int, n: int, *, wide: bool = True) -> StackedBytes:
    """Float8 as the kernels read it. `wide`: it is widened in registers, not multiplied as it is."""
    codes = found.codes.contiguous().view(torch.int8)
    scales = (found.scales.float() * (SHIFT if wide else 1.0)).contiguous()
    return StackedBytes(codes, scales, found.rows, found.columns, experts, parts, n)


def refusal_of_floats(fmt: FloatFormat) -> str | None:
    """Why the kernels do not take its weights; None: they do."""
    return f"runs blocks of multiples of 16 columns, not {fmt.columns}" if fmt.columns % 16 else None

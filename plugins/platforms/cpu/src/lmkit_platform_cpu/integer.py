"""Linears over weights of 8 or 4 bits with a scale, and perhaps an offset, per group of columns, as integers."""

from __future__ import annotations

from ctypes import c_int32, c_int64, c_void_p
from dataclasses import dataclass

import torch
from lmkit.api import DeviceInfo, IntegerFormat, Integers, LinearSpec, PackedWeight, QuantFormat
from torch import Tensor

from lmkit_platform_cpu.native import DTYPES, MISSING, Args, Native, load
from lmkit_platform_cpu.packed import DECODE_ROWS, PANEL, TILE_ROWS, check_bias, chunk_bytes, huge, matrix, prefill_step

BLOCK = 128  # columns of x that share a scale; sums of more would not fit 32 bits
LARGEST = 32512  # of an activation of 16 bits, as in csrc/integer.inc
LONGEST = 1 << 16  # as many with activations of 8 bits
GROUPS = (16, 32, 64, 128)
TILE_COLUMNS, SHORT = 64, 32  # of bytes in a tile register; the shortest block for which tiles are faster
CACHE_BYTES = 1 << 19  # of weight that a thread works on at a time in a prefill


class PackArgs(Args):
    _fields_ = [
        ("codes", c_void_p), ("scales", c_void_p), ("zeros", c_void_p), ("offsets", c_void_p), ("target", c_void_p),
        ("scales_out", c_void_p), ("zeros_out", c_void_p), ("offsets_out", c_void_p), ("n", c_int64), ("k", c_int64),
        ("group", c_int64), ("bits", c_int32),
    ]  # fmt: skip


class RoundArgs(Args):
    _fields_ = [
        ("weight", c_void_p), ("target", c_void_p), ("scales_out", c_void_p), ("zeros_out", c_void_p), ("n", c_int64),
        ("k", c_int64), ("stride", c_int64), ("group", c_int64), ("dtype", c_int32), ("bits", c_int32),
    ]  # fmt: skip


class IntegerArgs(Args):
    _fields_ = [
        ("weight", c_void_p), ("scales", c_void_p), ("zeros", c_void_p), ("offsets", c_void_p),
        ("table", c_void_p), ("x", c_void_p), ("bias", c_void_p), ("out", c_void_p), ("quantized", c_void_p),
        ("x_scales", c_void_p), ("x_sums", c_void_p), ("plain", c_void_p), ("m", c_int64),
        ("n", c_int64), ("k", c_int64), ("x_stride", c_int64), ("group", c_int64), ("block", c_int64),
        ("rows_step", c_int64), ("panels_step", c_int64), ("dtype", c_int32), ("bits", c_int32), ("planes", c_int32),
        ("zero", c_int32), ("tiled", c_int32), ("threads", c_int32),
    ]  # fmt: skip


@dataclass(frozen=True, slots=True)
class PackedIntegers:
    """Codes, scales and offsets (float16), and zeros, in panels; `group` columns share them.

    `order` and `table` (which has planes = 2): see Integers.
    """

    data: Tensor
    scales: Tensor
    zeros: Tensor | None
    zero: int
    n: int
    k: int
    group: int
    bits: int
    planes: int  # bytes of an activation: 2, or 1 with a scale per row
    order: Tensor | None = None
    offsets: Tensor | None = None
    table: Tensor | None = None

    @property
    def block(self) -> int:
        """Columns of x that share a scale."""
        if self.planes == 1 and LONGEST >= self.group >= self.k:
            return max(self.k, 1)
        return min(self.group, BLOCK)

    @property
    def tiled(self) -> bool:
        """Whether csrc/integer_many.inc can multiply many rows, see IntegerArgs."""
        several = SHORT <= self.block < self.k and not self.k % self.block and not self.k % TILE_COLUMNS
        signed = self.zeros is None and self.zero == 128 if self.bits == 8 or self.table is not None else True
        return several and signed

    @property
    def nbytes(self) -> int:
        others = (self.scales, self.zeros, self.offsets, self.order)
        return self.data.nbytes + sum(t.nbytes for t in others if t is not None)


class IntegerLinear:
    name = "linear_integer_native"
    packed_types = (PackedIntegers,)

    def __init__(self) -> None:
        self.native = load()

    def can_run(self, fmt: QuantFormat, layer: LinearSpec, device: DeviceInfo) -> str | None:
        if self.native is None:
            return MISSING
        if not isinstance(fmt, IntegerFormat):
            return f"runs formats of integers with a scale per group, not {fmt.name}"
        if fmt.bits not in (4, 8):
            return f"runs 4 and 8 bits, not {fmt.bits}"
        if fmt.group and fmt.group not in GROUPS:
            return f"runs groups of {', '.join(map(str, GROUPS))} columns, not {fmt.group}"
        return None

    def pack(
        self, fmt: QuantFormat, params: dict[str, Tensor], layer: LinearSpec, dtype: torch.dtype
    ) -> PackedIntegers:
        assert isinstance(fmt, IntegerFormat)
        assert self.native is not None
        planes = 1 if fmt.activations == "int8" else 2
        if fmt.rounding:
            return round_and_pack(self.native, params.pop("weight"), fmt.bits, fmt.group, planes, fmt.rounding)
        integers = fmt.integers(params)
        params.clear()
        return pack(self.native, integers, fmt.bits, fmt.group, planes)

    def apply(self, x: Tensor, weight: PackedWeight, bias: Tensor | None) -> Tensor:
        assert isinstance(weight, PackedIntegers)
        assert self.native is not None
        return linear(self.native, x, weight, bias)


def pack(native: Native, integers: Integers, bits: int, group: int, planes: int) -> PackedIntegers:
    """`group` columns share a scale; 0 = all."""
    n, k = integers.codes.shape
    group = group or max(k, 1)
    codes, scales = integers.codes.contiguous(), integers.scales.float().contiguous()
    zeros = integers.zeros if isinstance(integers.zeros, Tensor) else None
    zeros = None if zeros is None else zeros.to(torch.uint8).contiguous()
    offsets = None if integers.offsets is None else integers.offsets.float().contiguous()
    panels, groups = -(-n // PANEL), -(-k // group)
    depth = -(-k // 8) * 8
    data = huge(panels * PANEL * depth * bits // 8)
    packed_scales = torch.empty(panels * groups * PANEL, dtype=torch.float16)
    packed_zeros = None if zeros is None else torch.empty(panels * groups * PANEL, dtype=torch.uint8)
    table = None if integers.table is None else integers.table.to(torch.uint8).contiguous()
    planes = planes if table is None else 2
    packed_offsets = None if offsets is None else torch.empty(panels * groups * PANEL, dtype=torch.float16)
    args = PackArgs(
        codes=codes.data_ptr(), scales=scales.data_ptr(), zeros=None if zeros is None else zeros.data_ptr(),
        offsets=None if offsets is None else offsets.data_ptr(), target=data.data_ptr(),
        scales_out=packed_scales.data_ptr(), zeros_out=None if packed_zeros is None else packed_zeros.data_ptr(),
        offsets_out=None if packed_offsets is None else packed_offsets.data_ptr(), n=n, k=k, group=group, bits=bits,
    )  # fmt: skip
    args.chunks[0] = panels if k else 0
    native.run("integer_pack", args)
    zero = integers.zeros if isinstance(integers.zeros, int) else 0
    return PackedIntegers(
        data, packed_scales, packed_zeros, zero, n, k, group, bits, planes, integers.order, packed_offsets, table
    )


def round_and_pack(native: Native, weight: Tensor, bits: int, group: int, planes: int, rounding: str) -> PackedIntegers:
    """The same as `pack` of what `IntegerFormat.integers` gives, in one pass over weight [n, k] of any float type."""
    n, k = weight.shape
    weight = weight if weight.stride(1) == 1 else weight.contiguous()
    group = group or max(k, 1)
    panels, groups, depth = -(-n // PANEL), -(-k // group), -(-k // 8) * 8
    data = huge(panels * PANEL * depth * bits // 8)
    scales = torch.empty(panels * groups * PANEL, dtype=torch.float16)
    zeros = torch.empty(panels * groups * PANEL, dtype=torch.uint8) if rounding == "range" else None
    args = RoundArgs(
        weight=weight.data_ptr(), target=data.data_ptr(), scales_out=scales.data_ptr(),
        zeros_out=None if zeros is None else zeros.data_ptr(), n=n, k=k, stride=weight.stride(0), group=group,
        dtype=DTYPES[str(weight.dtype)], bits=bits,
    )  # fmt: skip
    args.chunks[0] = panels if k else 0
    native.run("integer_round", args)
    return PackedIntegers(data, scales, zeros, 0 if zeros is not None else 1 << (bits - 1), n, k, group, bits, planes)


def linear(native: Native, x: Tensor, weight: PackedIntegers, bias: Tensor | None = None) -> Tensor:
    """x [..., k] -> [..., n], in the dtype of x. Raises ValueError for what does not fit."""
    rows = matrix(x, weight.k)
    rows = rows if weight.order is None else rows.index_select(1, weight.order)
    check_bias(bias, weight.n, x.dtype)
    m, panels = rows.shape[0], -(-weight.n // PANEL)
    depth = -(-weight.k // 8) * 8
    blocks = max(1, -(-weight.k // weight.block))
    out = x.new_empty((m, weight.n))
    space = -(-m // TILE_ROWS) * TILE_ROWS
    quantized = torch.empty(max(1, space * 2 * depth), dtype=torch.int8)
    x_scales, x_sums = torch.empty(space * blocks), torch.empty(space * blocks, dtype=torch.int32)
    size = max(1, PANEL * depth * weight.bits // 8)
    args = IntegerArgs(
        weight=weight.data.data_ptr(), scales=weight.scales.data_ptr(),
        zeros=None if weight.zeros is None else weight.zeros.data_ptr(),
        offsets=None if weight.offsets is None else weight.offsets.data_ptr(),
        table=None if weight.table is None else weight.table.data_ptr(), x=rows.data_ptr(),
        bias=None if bias is None else bias.data_ptr(), out=out.data_ptr(), quantized=quantized.data_ptr(),
        x_scales=x_scales.data_ptr(), x_sums=x_sums.data_ptr(), m=m, n=weight.n, k=weight.k,
        x_stride=rows.stride(0), group=weight.group, block=weight.block, dtype=DTYPES[str(x.dtype)], bits=weight.bits,
        planes=weight.planes, zero=weight.zero, threads=native.threads,
    )  # fmt: skip
    if m <= DECODE_ROWS:
        args.rows_step = max(m, 1)
        args.panels_step = max(1, min(chunk_bytes(m) // size, panels // (4 * native.threads)))
    else:
        row_bytes = depth * weight.planes
        args.rows_step, args.panels_step = prefill_step(native, m, panels, max(1, CACHE_BYTES // size), row_bytes)
    args.tiled = native.isa == "amx" and m > TILE_ROWS and weight.tiled
    plain = None
    if args.tiled or (weight.bits == 4 and native.isa == "amx" and m > TILE_ROWS):  # unpacked once for a chunk's rows
        plain = torch.empty(native.threads * PANEL * depth, dtype=torch.uint8)
        args.plain = plain.data_ptr()
    args.chunks[0] = m
    args.chunks[1] = -(-m // args.rows_step) * -(-panels // args.panels_step) if m else 0
    native.run("integer", args)
    return out.view(*x.shape[:-1], weight.n)

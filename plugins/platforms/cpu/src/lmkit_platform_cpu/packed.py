"""Linears over packed weights in bfloat16, float16 or float32: the weight is read once, at the speed of memory."""

from __future__ import annotations

import mmap
from ctypes import c_int32, c_int64, c_void_p
from dataclasses import dataclass

import torch
from lmkit.api import DeviceInfo, LinearSpec, PackedWeight, QuantFormat
from torch import Tensor

from lmkit_platform_cpu.native import DTYPES, MISSING, Args, Native, load

PANEL = 32  # output rows side by side, as in csrc/linear.inc
HUGE = 1 << 21  # bytes of a huge page
DECODE_ROWS = 64  # up to so many rows of x a panel of the weight is read once
PREFILL_ROWS, PREFILL_PANELS, PREFILL_DEPTH = 96, 8, 1024  # a chunk of larger ones: what a core's second cache holds
# The rows of a chunk where tile registers multiply: fewer would wait for weights and for unpacking. The larger number
# where so many bytes, of a core's second cache, hold them.
TILED_ROWS, TILED_BYTES = (256, 512), 5 << 18
TILE_ROWS, TILE_COLUMNS = 16, 32  # of bfloat16 in a tile register
MAX_COMPACT_K = 1 << 19  # a stray's place has so many bits
COMPACT = 3  # a type of weights beside DTYPES: bfloat16 in 12 bits, as csrc/linear_compact.inc lays it out


class PackArgs(Args):
    _fields_ = [
        ("source", c_void_p), ("target", c_void_p), ("plain", c_void_p), ("n", c_int64), ("k", c_int64),
        ("stride", c_int64), ("panel_bytes", c_int64), ("max_strays", c_int64), ("from_", c_int32), ("to", c_int32),
        ("failed", c_int32),
    ]  # fmt: skip


class LinearArgs(Args):
    _fields_ = [
        ("weight", c_void_p), ("x", c_void_p), ("bias", c_void_p), ("out", c_void_p), ("wide", c_void_p),
        ("sums", c_void_p), ("tiles", c_void_p), ("plain", c_void_p), ("m", c_int64), ("n", c_int64), ("k", c_int64),
        ("x_stride", c_int64), ("panel_bytes", c_int64), ("rows_step", c_int64), ("panels_step", c_int64),
        ("k_step", c_int64), ("dtype", c_int32), ("weight_dtype", c_int32), ("threads", c_int32),
    ]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Packed:
    """A weight [n, k] in panels; `data` is its bytes."""

    data: Tensor
    n: int
    k: int
    dtype: torch.dtype
    panel_bytes: int
    compact: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of the weight itself; the last panel is padded."""
        return self.n * self.panel_bytes // PANEL


class NativeLinear:
    name = "linear_native"
    packed_types = (Packed,)

    def __init__(self) -> None:
        self.native = load()

    def can_run(self, fmt: QuantFormat, layer: LinearSpec, device: DeviceInfo) -> str | None:
        if fmt.name != "plain":
            return f"runs unquantized weights, not {fmt.name}"
        return MISSING if self.native is None else None

    def pack(self, fmt: QuantFormat, params: dict[str, Tensor], layer: LinearSpec, dtype: torch.dtype) -> Packed:
        assert self.native is not None
        weight = params.pop("weight")
        return pack(self.native, weight, dtype)

    def apply(self, x: Tensor, weight: PackedWeight, bias: Tensor | None) -> Tensor:
        assert isinstance(weight, Packed)
        assert self.native is not None
        return linear(self.native, x, weight, bias)


class CompactLinear(NativeLinear):
    """Weights whose values do not fit the compact form (see csrc/linear_compact.inc) stay plain."""

    name = "linear_compact"

    def can_run(self, fmt: QuantFormat, layer: LinearSpec, device: DeviceInfo) -> str | None:
        if self.native is not None and self.native.isa == "portable":
            return "unpacks with vector instructions, which the portable kernels do without"
        return super().can_run(fmt, layer, device)

    def pack(self, fmt: QuantFormat, params: dict[str, Tensor], layer: LinearSpec, dtype: torch.dtype) -> Packed:
        assert self.native is not None
        weight = params.pop("weight")
        return pack_compact(self.native, weight, dtype) or pack(self.native, weight, dtype)


def pack(native: Native, weight: Tensor, dtype: torch.dtype) -> Packed:
    """weight [n, k] of any of the three types -> panels in `dtype`."""
    n, k = weight.shape
    size = PANEL * (k + k % 2 if dtype == torch.bfloat16 else k) * dtype.itemsize
    packed = Packed(huge(-(-n // PANEL) * size), n, k, dtype, size)
    _fill(native, weight, packed, PackArgs(to=DTYPES[str(dtype)]))
    return packed


def pack_compact(native: Native, weight: Tensor, dtype: torch.dtype) -> Packed | None:
    """weight [n, k] in bfloat16 -> panels of 12 bits a value, read as the same bits; None if they do not fit."""
    n, k = weight.shape
    max_strays = -(-k // 256) * 16  # one of 512 values: more than ten times what a trained model was seen to need
    size = 64 + 48 * k + 4 * max_strays
    if not weight.dtype == dtype == torch.bfloat16 or k % 4 or k > MAX_COMPACT_K or size >= 64 * k:
        return None
    packed = Packed(huge(-(-n // PANEL) * size), n, k, dtype, size, compact=True)
    plain = torch.empty(native.threads * k * PANEL, dtype=dtype)
    args = PackArgs(to=COMPACT, plain=plain.data_ptr(), panel_bytes=size, max_strays=max_strays)
    _fill(native, weight, packed, args)
    return None if args.failed else packed


def _fill(native: Native, weight: Tensor, packed: Packed, args: PackArgs) -> None:
    if weight.stride(1) != 1:
        weight = weight.contiguous()
    args.source, args.target, args.from_ = weight.data_ptr(), packed.data.data_ptr(), DTYPES[str(weight.dtype)]
    args.n, args.k, args.stride = packed.n, packed.k, weight.stride(0)
    args.chunks[0] = -(-packed.n // PANEL) if packed.k else 0
    native.run("linear_pack", args)


def linear(native: Native, x: Tensor, weight: Packed, bias: Tensor | None = None) -> Tensor:
    """x [..., k] -> [..., n], in the dtype of x. Raises ValueError for what does not fit."""
    if x.dtype != weight.dtype:
        raise ValueError(f"a linear in {weight.dtype} got {x.dtype}")
    rows = matrix(x, weight.k)
    check_bias(bias, weight.n, x.dtype)
    m = rows.shape[0]
    out = x.new_empty((m, weight.n))
    args = LinearArgs(
        weight=weight.data.data_ptr(), x=rows.data_ptr(), bias=None if bias is None else bias.data_ptr(),
        out=out.data_ptr(), m=m, n=weight.n, k=weight.k, x_stride=rows.stride(0), dtype=DTYPES[str(x.dtype)],
        panel_bytes=weight.panel_bytes, weight_dtype=COMPACT if weight.compact else DTYPES[str(weight.dtype)],
        threads=native.threads,
    )  # fmt: skip
    scratch = _plan(native, args, weight, m)
    native.run("linear", args)
    del scratch
    return out.view(*x.shape[:-1], weight.n)


def matrix(x: Tensor, k: int) -> Tensor:
    """x [..., k] as rows without gaps between their values. Raises ValueError for what no kernel takes."""
    if not x.dim() or x.shape[-1] != k or str(x.dtype) not in DTYPES or x.device.type != "cpu":
        raise ValueError(f"a linear of {k} values got {list(x.shape)} in {x.dtype} on {x.device.type}")
    rows = x if x.dim() == 2 else x.reshape(x.numel() // max(k, 1), k)
    return rows if rows.stride(1) == 1 or k <= 1 else rows.contiguous()


def chunk_bytes(m: int) -> int:
    """Bytes of weight that a thread takes at a time in a step of `m` rows, at most DECODE_ROWS.

    From two tiles of rows on, each panel is asked for while the one before it is multiplied, and the first of the chunk
    that the thread probably takes next with the last of this one.
    """
    return 1 << 17 if m <= 12 else 1 << 19


def prefill_step(native: Native, m: int, panels: int, most: int, row_bytes: int) -> tuple[int, int]:
    """Rows of x and, at most `most`, panels of a weight in a chunk of a step of `m` rows, more than DECODE_ROWS.

    `row_bytes` of each row are read again for every panel of a chunk.
    """
    if native.isa != "amx":
        return PREFILL_ROWS, most
    few, many = TILED_ROWS
    tile, heights = 2 * TILE_ROWS, -(-m // (many if many * row_bytes <= TILED_BYTES else few))
    rows = -(-m // (heights * tile)) * tile  # chunks of about equal size, in whole tiles
    return rows, max(1, min(most, panels * heights // (4 * native.threads)))


def check_bias(bias: Tensor | None, n: int, dtype: torch.dtype) -> None:
    if bias is not None and (bias.shape != (n,) or bias.dtype != dtype or not bias.is_contiguous()):
        raise ValueError(f"a bias of {n} values in {dtype} is needed, not {list(bias.shape)} in {bias.dtype}")


def _plan(native: Native, args: LinearArgs, weight: Packed, m: int) -> list[Tensor]:
    """How the work is cut, and the scratch memory that it needs."""
    panels, scratch = -(-weight.n // PANEL), []
    dot = weight.dtype == torch.bfloat16 and native.isa in ("avx512_bf16", "amx")
    if m <= DECODE_ROWS:
        args.rows_step, args.k_step = max(m, 1), weight.k
        args.panels_step = max(1, min(chunk_bytes(m) // max(weight.panel_bytes, 1), panels // (4 * native.threads)))
    else:
        args.k_step = PREFILL_DEPTH
        row_bytes = min(weight.k, PREFILL_DEPTH) * weight.dtype.itemsize
        args.rows_step, args.panels_step = prefill_step(native, m, panels, PREFILL_PANELS, row_bytes)
        if dot and native.isa == "amx":
            args.chunks[0] = -(-m // TILE_ROWS)
            tiles = args.chunks[0] * -(-weight.k // TILE_COLUMNS)
            scratch.append(torch.empty(tiles * TILE_ROWS * TILE_COLUMNS, dtype=weight.dtype))
            args.tiles = scratch[-1].data_ptr()
    if args.k_step < weight.k:
        scratch.append(torch.empty(native.threads * args.rows_step * args.panels_step * PANEL))
        args.sums = scratch[-1].data_ptr()
    alone = {"avx512_bf16": DECODE_ROWS, "amx": 2 * TILE_ROWS}  # up to so many rows a panel is unpacked in registers
    if weight.compact and m > alone.get(native.isa, 0):
        scratch.append(torch.empty(native.threads * args.k_step * PANEL, dtype=weight.dtype))
        args.plain = scratch[-1].data_ptr()
    if weight.dtype != torch.float32 and not dot:
        scratch.append(torch.empty(m * weight.k))
        args.wide = scratch[-1].data_ptr()
        args.chunks[0] = m
    args.chunks[1] = -(-m // args.rows_step) * -(-panels // args.panels_step) if m else 0
    return scratch


def huge(size: int) -> Tensor:
    """`size` bytes, on huge pages where they pay: a weight is read from end to end at every step."""
    if size < HUGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(size, dtype=torch.uint8)
    mapped = mmap.mmap(-1, size + HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    mapped.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(mapped, dtype=torch.uint8)
    start = -whole.data_ptr() % HUGE
    return whole[start : start + size]

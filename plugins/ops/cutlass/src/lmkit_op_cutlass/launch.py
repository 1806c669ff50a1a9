"""Compiles kernels when they are first asked for, and launches them on torch's stream."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import cutlass
import torch
from cuda.bindings.driver import CUstream
from cutlass import cute
from cutlass.cute.runtime import make_ptr
from torch import Tensor

from lmkit_op_cutlass import sm90, sm90_int4, sm100
from lmkit_op_cutlass.tiles import ALIGNED, Tile, band_of, tile_for, tiles_of

TYPES = {
    torch.bfloat16: cutlass.BFloat16,
    torch.float16: cutlass.Float16,
    torch.float8_e4m3fn: cutlass.Float8E4M3FN,
    torch.float32: cutlass.Float32,
    torch.int32: cutlass.Int32,
}


@dataclass(frozen=True, slots=True)
class Variant:
    """What a kernel is compiled for: dtypes of x (and of weights, but for codes) and of the result.

    `scales` of float8 as `sm90.Linear` has them; `group` of codes as `sm90_int4.Int4Linear` has it, None = no codes.
    """

    arch: str  # sm_90a or sm_100a
    tile: Tile
    kind: torch.dtype
    out: torch.dtype
    scales: str = ""
    group: int | None = None
    bias: bool = False

    @property
    def kernel(self) -> Any:
        kind, out = TYPES[self.kind], TYPES[self.out]
        if self.group is not None:
            return sm90_int4.Int4Linear(self.tile, kind, self.group)
        return {"sm_90a": sm90, "sm_100a": sm100}[self.arch].Linear(self.tile, kind, out, self.scales)

    def compile(self, options: str = "") -> Any:
        """The compiled kernel, for the GPU at hand; for another, or without one, `options` has "--gpu-arch ARCH"."""
        kind, out, number = TYPES[self.kind], TYPES[self.out], cutlass.Int32
        weights, scales = (kind if self.group is None else number), cutlass.Float32
        operands = [weights, kind, out, out if self.bias else None]
        operands += [number] if self.group is not None else [scales, scales] if self.scales else [None, None]
        pointers = [each and pointer(each, ALIGNED, i) for i, each in enumerate(operands)]
        return cute.compile(self.kernel, *pointers, *map(number, (128, 128, 16, 1, 1)), CUstream(0), options=options)


@cache
def compiled(variant: Variant, tiles: tuple[Tile, ...]) -> dict[Tile, Any]:
    """Kernels of a variant by tile. All are compiled with the first, so that none is in a later request."""
    return {tile: replace(variant, tile=tile).compile() for tile in tiles}


def pointer(kind: type[cutlass.Numeric], address: int, place: int) -> Any:
    """An operand by its place: the first two, weights and x, begin at multiples of 16 bytes."""
    return make_ptr(kind, address, cute.AddressSpace.gmem, assumed_align=ALIGNED if place < 2 else kind.width // 8)


def multiply(
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    bias: Tensor | None = None,
    scales: str = "",
    factors: tuple[Tensor | None, ...] = (None, None),
    group: int | None = None,
) -> None:
    """x [t, k] times weight, + bias [n] -> out [t, n]; t > 0. `factors` are the kernel's operands after the bias."""
    (t, k), n = x.shape, out.shape[1]
    properties = torch.cuda.get_device_properties(x.device)
    arch = f"sm_{properties.major}{properties.minor}a"
    twice = bool(scales) or group is not None
    tile, tiles = tile_for(arch, t, twice), tiles_of(arch, twice)
    kernels = compiled(Variant(arch, tiles[0], x.dtype, out.dtype, scales, group, bias is not None), tiles)
    assert bias is None or bias.dtype == out.dtype
    tensors = (weight, x, out, bias, *factors)
    operands = [None if each is None else handed(each, i) for i, each in enumerate(tensors)]
    rows, columns = -(-n // tile.rows), -(-t // tile.tokens)
    blocks = min(rows * columns, properties.multi_processor_count)
    stream = CUstream(torch.cuda.current_stream(x.device).cuda_stream)
    kernels[tile](*operands, n, k, t, band_of(rows), blocks, stream)


def handed(tensor: Tensor, place: int) -> Any:
    """Its address; AssertionError where the kernel would read elsewhere."""
    assert tensor.is_contiguous()
    assert place >= 2 or tensor.data_ptr() % ALIGNED == 0
    return pointer(TYPES[tensor.dtype], tensor.data_ptr(), place)

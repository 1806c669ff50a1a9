"""TritonExperts: mixtures on a GPU in four launches, whatever the number of experts. None waits for the device."""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import triton
from lmkit.api import DeviceInfo, IntegerFormat, Integers, LinearSpec, QuantFormat, RowOps
from torch import Tensor
from torch.nn import functional as F

from lmkit_op_triton import moe_kernels as kernels
from lmkit_op_triton.rowops import ACTIVATIONS, CAPABILITY

BLOCK = 1024  # entries of a program that goes through choices, or sums products
PLAIN = sorted(ACTIVATIONS - {"swiglu_clamped"})  # of experts that have one part


@dataclass(frozen=True, slots=True)
class Tile:
    """How `multiply` is launched where an expert has at most `rows` rows on average (None: any number)."""

    rows: int | None
    m: int  # rows of a program
    n: int  # rows of weights of a program, of all parts
    k: int  # columns at a time
    warps: int
    stages: int


@lru_cache
def tables() -> dict[str, dict[str, tuple[Tile, ...]]]:
    """By device ("sm_90", "gfx942", else "cuda" or "rocm") and weights; those for few rows first.

    Weights are "2" or "4" bytes each, or "codes", whose groups say how many columns are taken at a time.
    """
    found = json.loads(Path(__file__).with_name("tiles.json").read_text(encoding="utf-8"))
    return {
        device: {size: tuple(Tile(**tile) for tile in tiles) for size, tiles in sizes.items()}
        for device, sizes in found.items()
    }


def tiles_of(name: str, weights: str) -> tuple[Tile, ...]:
    """For a device by the name of its architecture."""
    general = "rocm" if name.startswith("gfx") else "cuda"
    return tables().get(name, {}).get(weights) or tables()[general][weights]


@lru_cache
def architecture(device: torch.device) -> str:
    """The name of a GPU: "sm_90", "gfx942"; "cuda" where torch knows none."""
    if device.type != "cuda":
        return "cuda"
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip:
        return str(properties.gcnArchName).partition(":")[0]
    return f"sm_{properties.major}{properties.minor}"


def tile_for(device: torch.device, weights: str, rows: int) -> Tile:
    """`rows`: of an expert, on average."""
    return next(t for t in tiles_of(architecture(device), weights) if t.rows is None or rows <= t.rows)


def most_tiles(pairs: int, experts: int, rows: int) -> int:
    """How many tiles of `rows` rows there can be: each expert that has any may leave one unfilled."""
    return (pairs + min(pairs, experts) * (rows - 1)) // rows


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
    bits: int
    group: int
    half: int
    experts: int
    parts: int
    n: int
    k: int

    @property
    def nbytes(self) -> int:
        parts = (self.codes, self.scales, self.zeros, self.offsets)
        return sum(part.nbytes for part in parts if part is not None)


def stacked(found: Integers, bits: int, group: int, experts: int, parts: int, n: int) -> StackedCodes:
    """Integers as the kernel reads them. Scales and offsets become float16."""
    half, k = half_of(group), found.codes.shape[1]
    codes = F.pad(found.codes, (0, -k % (2 * half)))
    if bits == 4:
        low, high = codes.unflatten(1, (-1, 2, half)).unbind(2)
        codes = (low | (high << 4)).flatten(1)

    def turned(values: Tensor) -> Tensor:
        return values.view(experts, parts, n, -1).transpose(2, 3).contiguous()

    table = None if found.table is None else struct.unpack("<2q", bytes(found.table.tolist()))
    zeros = found.zeros if isinstance(found.zeros, Tensor) else None
    return StackedCodes(
        codes.contiguous(), turned(found.scales.half()), None if zeros is None else turned(zeros),
        None if found.offsets is None else turned(found.offsets.half()), 0 if zeros is not None else int(found.zeros),
        table, bits, group, half, experts, parts, n, k,
    )  # fmt: skip


def half_of(group: int) -> int:
    """Columns that are multiplied at once: all of one group. 0: they fit no tensor core."""
    return next((half for half in (64, 32, 16) if group % half == 0), 0)


class TritonExperts:
    """See `lmkit.api.ExpertKernel`. An expert that is none (ids out of range) makes the token's result NaN.

    Sums are float32 in an order that does not change, so that results of a batch repeat.
    """

    name = "moe_triton"
    packed_types = (StackedExperts, StackedCodes)

    def can_run(self, fmt: QuantFormat, layer: LinearSpec, device: DeviceInfo, act: str | None = None) -> str | None:
        known = sorted(ACTIVATIONS) if len(layer.out_features) == 2 * layer.experts else PLAIN
        if act is not None and act not in known:
            return f"runs {', '.join(known)}, not {act}"
        if device.platform == "cuda" and device.capability is not None and device.capability < CAPABILITY:
            has = ".".join(map(str, device.capability))
            return f"Triton's kernels need compute capability 8.0, the device has {has}"
        if fmt.name == "plain":
            return None
        if not isinstance(fmt, IntegerFormat) or fmt.bits not in (4, 8):
            return f"runs plain weights and integers of 4 or 8 bits, not {fmt.name}"
        if fmt.ordered:
            return "runs columns in their own order only"
        return None if half_of(fmt.group) else f"runs groups of multiples of 16 columns, not {fmt.group}"

    def pack(
        self, fmt: QuantFormat, params: dict[str, Tensor], layer: LinearSpec, dtype: torch.dtype
    ) -> StackedExperts | StackedCodes:
        n, parts = layer.out_features[0], len(layer.out_features) // layer.experts
        if isinstance(fmt, IntegerFormat):
            found = fmt.integers(params)
            params.clear()
            return stacked(found, fmt.bits, fmt.group, layer.experts, parts, n)
        weight = fmt.dequantize(params, dtype).contiguous()
        params.clear()
        return StackedExperts(weight, layer.experts, parts, n)

    def apply(self, x: Tensor, ids: Tensor, weights: Tensor, up: Any, down: Any, act: str, rows: RowOps) -> Tensor:
        first, last = up.packed, down.packed
        check(x, ids, weights, up, down)
        x = x if x.stride(1) == 1 else x.contiguous()
        ids, weights = ids.contiguous(), weights.contiguous()
        (tokens, top_k), pairs = ids.shape, ids.numel()
        out = x.new_empty(tokens, last.n)
        if not pairs:
            return out.zero_()
        order = torch.empty(pairs, dtype=torch.int32, device=x.device)
        starts = torch.empty(first.experts + 1, dtype=torch.int32, device=x.device)
        block = min(BLOCK, max(16, triton.next_power_of_2(pairs)))
        kernels.sort[(first.experts,)](ids, order, starts, pairs, first.experts, block, num_warps=4)
        middle, products = x.new_empty(pairs, first.n), x.new_empty(pairs, last.n)
        multiply(x, up, order, starts, middle, top_k, act)
        multiply(middle, down, order, starts, products, top_k, None)
        held = min(BLOCK, triton.next_power_of_2(last.n))
        kernels.combine[(tokens, triton.cdiv(last.n, held))](
            products, ids, weights, out, top_k, first.experts, last.n, held, num_warps=4
        )
        return out


def multiply(x: Tensor, linear: Any, order: Tensor, starts: Tensor, out: Tensor, top_k: int, act: str | None) -> None:
    """The first linear with its activation, or (None) the second."""
    stack, pairs = linear.packed, len(order)
    dense = isinstance(stack, StackedExperts)
    tile = tile_for(x.device, str(x.itemsize) if dense else "codes", triton.cdiv(pairs, stack.experts))
    columns = tile.n // stack.parts
    grid = (triton.cdiv(stack.n, columns), most_tiles(pairs, stack.experts, tile.m))
    constants = (act is not None, act or "", stack.parts, linear.bias is not None)
    held = triton.next_power_of_2(stack.experts)
    bias = x if linear.bias is None else linear.bias
    if dense:
        kernels.multiply[grid](
            x, stack.weight, bias, order, starts, out, top_k, stack.experts, stack.n, stack.k, x.stride(0),
            *constants, tile.m, columns, tile.k, held, num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
        return
    zeros, offsets, (low, high) = stack.zeros, stack.offsets, stack.table or (0, 0)
    kernels.multiply_codes[grid](
        x, stack.codes, stack.scales, stack.codes if zeros is None else zeros,
        stack.scales if offsets is None else offsets, bias, order, starts, out,
        top_k, stack.experts, stack.n, stack.k, stack.codes.shape[1], stack.scales.shape[2], x.stride(0),
        stack.zero, low, high, *constants, zeros is not None, offsets is not None, stack.table is not None,
        stack.bits, stack.group, stack.half, tile.m, columns, held, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


def check(x: Tensor, ids: Tensor, weights: Tensor, up: Any, down: Any) -> None:
    """Raises ValueError for what the kernels do not take."""
    first, last = up.packed, down.packed
    fits = x.dim() == ids.dim() == 2 and x.shape[1] == first.k
    fits &= ids.shape == weights.shape and len(ids) == len(x) and ids.dtype == torch.int64 and weights.dtype == x.dtype
    fits &= first.experts == last.experts and first.n == last.k and last.parts == 1
    for linear in (up, down):
        stack = linear.packed
        fits &= not isinstance(stack, StackedExperts) or stack.weight.dtype == x.dtype
        if linear.bias is not None:
            size = stack.experts * stack.parts * stack.n
            fits &= linear.bias.shape == (size,) and linear.bias.dtype == x.dtype and linear.bias.is_contiguous()
    if not fits:
        shapes = ", ".join(f"{list(t.shape)} {t.dtype}" for t in (x, ids, weights))
        raise ValueError(f"{first.experts} experts of {first.k} to {last.n} values got {shapes}")

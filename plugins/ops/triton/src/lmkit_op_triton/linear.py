"""Linears over weights of few bits: integers of 4 and 8 bits, 4-bit floats, and float8. None waits for the device."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd
from typing import Any

import torch
import triton
from lmkit.api import DeviceInfo, IntegerFormat, Integers, LinearKernel, LinearSpec, PackedWeight, QuantFormat
from lmkit_layouts import FloatFormat, Rounding
from torch import Tensor

from lmkit_op_triton import linear_kernels as kernels
from lmkit_op_triton import row_kernels
from lmkit_op_triton.rowops import refusal_of_device
from lmkit_op_triton.tiles import Tile, architecture, takes_ptx, tile_for
from lmkit_op_triton.weights import (
    WHOLE,
    StackedBytes,
    StackedCodes,
    half_of,
    refusal_of_floats,
    stacked,
    stacked_floats,
)

MOST_SPLITS = 16
BLOCK = 1024  # entries of a program that adds up parts
ROUNDED = 16384  # at most, of one that rounds activations
LONGEST = 1 << 17  # columns whose products of 8 bits each a sum of 32 bits holds
FLOAT8 = (8, 9)  # compute capability of the first NVIDIA GPUs that multiply it
WIDE, INTEGERS, FLOATS = range(3)  # what activations are multiplied as


@dataclass(frozen=True, slots=True)
class RoundedInputs:
    """Weights of a byte each, and what activations are rounded to before they are multiplied."""

    weight: StackedBytes
    inputs: int  # WIDE: to nothing
    zeros: Tensor | None = None  # [n] int8, of INTEGERS
    rounding: Rounding | None = None  # of FLOATS
    input_scale: float = 1.0

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes + (0 if self.zeros is None else self.zeros.nbytes)


class TritonLinear(LinearKernel):
    """Integers and 4-bit floats, activations as they are; those of `w8a8` become 8 bits, with a scale for each row."""

    name = "linear_triton"
    packed_types = (StackedCodes, RoundedInputs, StackedBytes)

    def can_run(self, fmt: QuantFormat, layer: LinearSpec, device: DeviceInfo) -> str | None:
        if reason := refusal_of_device(device):
            return reason
        if not isinstance(fmt, IntegerFormat) or fmt.bits not in (4, 8):
            return f"runs integers of 4 or 8 bits, not {fmt.name}"
        return None if half_of(fmt.group) else f"runs groups of multiples of 16 columns, not {fmt.group}"

    def pack(
        self, fmt: QuantFormat, params: dict[str, Tensor], layer: LinearSpec, dtype: torch.dtype
    ) -> StackedCodes | RoundedInputs:
        assert isinstance(fmt, IntegerFormat)
        found = fmt.integers(params)
        params.clear()
        if fmt.bits == 8 and fmt.activations == "int8" and not fmt.group and fits_integers(found):
            return of_bytes(found)
        return stacked(found, fmt.bits, fmt.group, 1, 1, layer.total_out)

    def apply(self, x: Tensor, weight: PackedWeight, bias: Tensor | None) -> Tensor:
        assert isinstance(weight, StackedCodes | RoundedInputs)
        return linear(x, weight, bias)


class TritonFloat8Linear(LinearKernel):
    """float8 weights. Activations become float8 where the checkpoint says so and the device multiplies it; else they
    stay as they are."""

    name = "fp8_triton"
    packed_types = (RoundedInputs, StackedBytes, Rounding)

    def can_run(self, fmt: QuantFormat, layer: LinearSpec, device: DeviceInfo) -> str | None:
        if reason := refusal_of_device(device):
            return reason
        if not isinstance(fmt, FloatFormat):
            return f"runs float8, not {fmt.name}"
        if fmt.inputs is not None and fmt.inputs.kind == "tensor":
            return "rounds activations of a row or of its groups, not all of a step by one scale"
        if fmt.inputs is not None and fmt.inputs.kind == "group" and fmt.inputs.group != fmt.columns:
            return f"needs groups of activations like those of weights, {fmt.columns}, not {fmt.inputs.group}"
        if fmt.inputs is not None and fmt.inputs.kind != "group" and fmt.columns:
            return "needs a scale for each group of activations where weights have one for each block"
        return refusal_of_floats(fmt)

    def pack(self, fmt: QuantFormat, params: dict[str, Tensor], layer: LinearSpec, dtype: torch.dtype) -> RoundedInputs:
        assert isinstance(fmt, FloatFormat)
        rounding = fmt.inputs if dtype != torch.float32 and multiplies_float8(params["weight"].device) else None
        found = fmt.floats(params, rounding is not None)
        params.clear()
        inputs = WIDE if rounding is None else FLOATS
        weight = stacked_floats(found, 1, 1, layer.total_out, wide=inputs == WIDE)
        return RoundedInputs(weight, inputs, rounding=rounding, input_scale=found.input_scale)

    def apply(self, x: Tensor, weight: PackedWeight, bias: Tensor | None) -> Tensor:
        assert isinstance(weight, RoundedInputs)
        return linear(x, weight, bias)


def multiplies_float8(device: torch.device) -> bool:
    """Whether products of float8 are the device's own. Where torch knows no GPU: yes."""
    name = architecture(device)
    if name.startswith("sm_"):
        return torch.cuda.get_device_capability(device) >= FLOAT8
    return name not in ("gfx90a", "gfx942") and not name.startswith(("gfx10", "gfx11"))


def fits_integers(found: Integers) -> bool:
    """Whether integers can be multiplied as such, with a scale and perhaps a zero for each row."""
    plain = found.offsets is None and found.table is None and found.order is None
    return plain and found.codes.shape[1] <= LONGEST


def of_bytes(found: Integers) -> RoundedInputs:
    """Codes less 128 as int8, and so their zeros; without zeros where they are 0."""
    codes = (found.codes ^ 128).view(torch.int8).contiguous()
    given, zeros = found.zeros, None
    if not isinstance(given, Tensor) and given != 128:
        given = torch.full((len(codes), 1), given, dtype=torch.uint8, device=codes.device)
    if isinstance(given, Tensor):
        zeros = (given.flatten() ^ 128).view(torch.int8).contiguous()
    weight = StackedBytes(codes, found.scales.float().contiguous(), 1, 0, 1, 1, len(codes))
    return RoundedInputs(weight, INTEGERS, zeros)


def splits_of(m: int, n: int, k: int, tile: Tile, step: int, nbytes: int) -> int:
    """How many parts columns are cut into, so that programs fill a device: a power of two.

    Each part has four steps or more, and no more bytes of parts are written and read than the weight has.
    """
    programs = triton.cdiv(n, tile.n) * triton.cdiv(m, tile.m)
    most = min(tile.full // programs, k // (4 * step), nbytes // (8 * m * n), MOST_SPLITS)
    return 1 << max(0, most.bit_length() - 1)


def linear(x: Tensor, weight: StackedCodes | RoundedInputs, bias: Tensor | None) -> Tensor:
    """x [..., k] -> [..., n], in the dtype of x. Raises ValueError for what does not fit."""
    stack = weight if isinstance(weight, StackedCodes) else weight.weight
    rows = x.reshape(-1, x.shape[-1])
    fits = rows.shape[1] == stack.k and x.dtype in (torch.float32, torch.bfloat16, torch.float16)
    if not fits or (bias is not None and (bias.shape != (stack.n,) or bias.dtype != x.dtype)):
        offered = f"{list(x.shape)} {x.dtype}" + (
            "" if bias is None else f" and biases {list(bias.shape)} {bias.dtype}"
        )
        raise ValueError(f"a linear of {stack.k} to {stack.n} values got {offered}")
    out = x.new_empty(len(rows), stack.n)
    if len(rows):
        if isinstance(weight, StackedCodes):
            _of_codes(rows, weight, bias, out)
        else:
            _of_bytes(rows, weight, bias, out)
    return out.view(*x.shape[:-1], stack.n)


def _of_codes(x: Tensor, stack: StackedCodes, bias: Tensor | None, out: Tensor) -> None:
    x = x if stack.order is None else x.index_select(1, stack.order)
    x = x if x.stride(1) == 1 else x.contiguous()
    (m, k), n, step = x.shape, stack.n, 2 * stack.half
    if m == 1 and stack.kind == WHOLE and x.itemsize == 2:
        _of_row(x, stack, bias, out)
        return
    tile = tile_for(x.device, f"linear codes {x.itemsize}", m)
    splits = splits_of(m, n, k, tile, step, stack.nbytes)
    target = out if splits == 1 else torch.empty((splits, m, n), dtype=torch.float32, device=x.device)
    grid = (triton.cdiv(n, tile.n), triton.cdiv(m, tile.m), splits)
    zeros, offsets, (low, high) = stack.zeros, stack.offsets, stack.table or (0, 0)
    kernels.multiply_codes[grid](
        x, stack.codes, stack.scales, stack.codes if zeros is None else zeros,
        stack.scales if offsets is None else offsets, x if bias is None else bias, target,
        m, n, k, stack.codes.shape[1], x.stride(0), each_of(k, splits, step), stack.zero, low, high,
        bias is not None, zeros is not None, offsets is not None, stack.kind, stack.bits, stack.group, stack.half,
        splits, tile.m, tile.n, takes_ptx(x.device), num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    _add_up(target, bias, out, splits)


def _of_row(x: Tensor, stack: StackedCodes, bias: Tensor | None, out: Tensor) -> None:
    """x [1, k] -> out [1, n]."""
    tile, zeros, offsets = tile_for(x.device, "row of codes", 1), stack.zeros, stack.offsets
    row_kernels.one_row_of_codes[(triton.cdiv(stack.n, tile.n),)](
        x, stack.codes, stack.scales, stack.codes if zeros is None else zeros,
        stack.scales if offsets is None else offsets, x if bias is None else bias, out, stack.n, stack.k,
        stack.codes.shape[1], stack.zero, bias is not None, zeros is not None, offsets is not None, stack.bits,
        stack.group, stack.half, tile.n, tile.k // 16, tile.stages, takes_ptx(x.device), num_warps=tile.warps,
    )  # fmt: skip


def _of_bytes(x: Tensor, weight: RoundedInputs, bias: Tensor | None, out: Tensor) -> None:
    stack, (m, k) = weight.weight, x.shape
    x = x if x.stride(1) == 1 else x.contiguous()
    codes, scales, sums = rounded(x, weight)
    tile = tile_for(x.device, f"linear bytes {codes.itemsize}", m)
    n, step = stack.n, gcd(tile.k, stack.group)
    splits = splits_of(m, n, k, tile, step, stack.nbytes)
    target = out if splits == 1 else torch.empty((splits, m, n), dtype=torch.float32, device=x.device)
    grid = (triton.cdiv(n, tile.n), triton.cdiv(m, tile.m), splits)
    zeros, given = weight.zeros, x if bias is None else bias
    sizes = (m, n, k, stack.scales.shape[1])
    shape = (stack.rows, stack.group, splits, tile.m, tile.n, step)
    if weight.inputs == WIDE:
        kernels.multiply_wide[grid](
            x, stack.codes, stack.scales, given, target, *sizes, x.stride(0), each_of(k, splits, step),
            bias is not None, *shape, num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
    else:
        kernels.multiply_bytes[grid](
            codes, stack.codes, stack.scales, scales, sums, stack.codes if zeros is None else zeros, given, target,
            *sizes, scales.shape[-1], codes.stride(0), each_of(k, splits, step), bias is not None, zeros is not None,
            weight.inputs == INTEGERS, *shape, num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
    _add_up(target, bias, out, splits)


def each_of(k: int, splits: int, step: int) -> int:
    """Columns of a part: whole steps."""
    return triton.cdiv(triton.cdiv(k, step), splits) * step


def rounded(x: Tensor, weight: RoundedInputs) -> tuple[Tensor, Tensor, Tensor]:
    """x [m, k] as the weights want it: codes, scales [m, groups] float32 and sums of codes [m] int32.

    Where it stays as it is, or has no sums, that is x itself.
    """
    m, k = x.shape
    if weight.inputs == WIDE:
        return x, x, x
    held = min(ROUNDED, max(16, triton.next_power_of_2(k)))
    if weight.inputs == INTEGERS:
        codes = torch.empty((m, k), dtype=torch.int8, device=x.device)
        scales = torch.empty((m, 1), dtype=torch.float32, device=x.device)
        sums = torch.empty(m, dtype=torch.int32, device=x.device)
        kernels.round_integers[(m,)](x, codes, scales, sums, k, x.stride(0), held, num_warps=warps_of(held))
        return codes, scales, sums
    rounding: Any = weight.rounding
    group = rounding.group if rounding.kind == "group" else 0
    groups = triton.cdiv(k, group) if group else 1
    codes = torch.empty((m, k), dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty((m, groups), dtype=torch.float32, device=x.device)
    held = min(held, triton.next_power_of_2(group)) if group else held
    kernels.round_floats[(m, groups)](
        x, codes, scales, weight.input_scale, k, groups, x.stride(0), rounding.kind == "stored", group,
        rounding.powers, held, num_warps=warps_of(held),
    )  # fmt: skip
    return codes, scales, x


def warps_of(held: int) -> int:
    """How many a program has that rounds so many activations at once."""
    return min(16, max(1, held // 1024))


def _add_up(parts: Tensor, bias: Tensor | None, out: Tensor, splits: int) -> None:
    if splits > 1:
        kernels.merge[(triton.cdiv(out.numel(), BLOCK),)](
            parts, out if bias is None else bias, out, out.numel(), out.shape[1], bias is not None, splits, BLOCK,
            num_warps=4,
        )  # fmt: skip

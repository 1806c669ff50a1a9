"""TritonExperts: mixtures on a GPU in four launches, whatever the number of experts. None waits for the device."""

from __future__ import annotations

from math import gcd
from typing import Any

import torch
import triton
from lmkit.api import DeviceInfo, IntegerFormat, LinearSpec, QuantFormat, RowOps
from lmkit_layouts import FloatFormat
from torch import Tensor

from lmkit_op_triton import moe_kernels as kernels
from lmkit_op_triton.rowops import ACTIVATIONS, refusal_of_device
from lmkit_op_triton.tiles import takes_ptx, tile_for
from lmkit_op_triton.weights import (
    StackedBytes,
    StackedCodes,
    StackedExperts,
    half_of,
    refusal_of_floats,
    stacked,
    stacked_floats,
)

BLOCK = 1024  # entries of a program that goes through choices, or sums products
PLAIN = sorted(ACTIVATIONS - {"swiglu_clamped"})  # of experts that have one part


def most_tiles(pairs: int, experts: int, rows: int) -> int:
    """How many tiles of `rows` rows there can be: each expert that has any may leave one unfilled."""
    return (pairs + min(pairs, experts) * (rows - 1)) // rows


class TritonExperts:
    """See `lmkit.api.ExpertKernel`. An expert that is none (ids out of range, but -1) makes the token's result NaN.

    Sums are float32 in an order that does not change, so that results of a batch repeat.
    """

    name = "moe_triton"
    skips = True
    packed_types = (StackedExperts, StackedCodes, StackedBytes)

    def can_run(self, fmt: QuantFormat, layer: LinearSpec, device: DeviceInfo, act: str | None = None) -> str | None:
        known = sorted(ACTIVATIONS) if len(layer.out_features) == 2 * layer.experts else PLAIN
        if act is not None and act not in known:
            return f"runs {', '.join(known)}, not {act}"
        if reason := refusal_of_device(device):
            return reason
        if fmt.name == "plain":
            return None
        if isinstance(fmt, FloatFormat):
            return refusal_of_floats(fmt)
        if not isinstance(fmt, IntegerFormat) or fmt.bits not in (4, 8):
            return f"runs plain weights, float8 and integers of 4 or 8 bits, not {fmt.name}"
        if fmt.ordered:
            return "runs columns in their own order only"
        return None if half_of(fmt.group) else f"runs groups of multiples of 16 columns, not {fmt.group}"

    def pack(
        self, fmt: QuantFormat, params: dict[str, Tensor], layer: LinearSpec, dtype: torch.dtype
    ) -> StackedExperts | StackedCodes | StackedBytes:
        n, parts = layer.out_features[0], len(layer.out_features) // layer.experts
        if isinstance(fmt, IntegerFormat):
            found = fmt.integers(params)
            params.clear()
            return stacked(found, fmt.bits, fmt.group, layer.experts, parts, n)
        if isinstance(fmt, FloatFormat):
            floats = fmt.floats(params, rounds=False)
            params.clear()
            return stacked_floats(floats, layer.experts, parts, n)
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
    size = {StackedCodes: "codes", StackedBytes: "float8"}.get(type(stack), str(x.itemsize))
    tile = tile_for(x.device, size, triton.cdiv(pairs, stack.experts))
    columns = tile.n // stack.parts
    grid = (triton.cdiv(stack.n, columns), most_tiles(pairs, stack.experts, tile.m))
    constants = (act is not None, act or "", stack.parts, linear.bias is not None)
    held = triton.next_power_of_2(stack.experts)
    bias = x if linear.bias is None else linear.bias
    if not isinstance(stack, StackedCodes):
        float8 = isinstance(stack, StackedBytes)
        weight, scales = (stack.codes, stack.scales) if float8 else (stack.weight, x)
        groups, rows, group = (scales.shape[1], stack.rows, stack.group) if float8 else (1, 1, 0)
        kernels.multiply[grid](
            x, weight, scales, bias, order, starts, out, top_k, stack.experts, stack.n, stack.k, groups, x.stride(0),
            *constants, float8, rows, group, tile.m, columns, gcd(tile.k, group), held,
            num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
        return
    zeros, offsets, (low, high) = stack.zeros, stack.offsets, stack.table or (0, 0)
    kernels.multiply_codes[grid](
        x, stack.codes, stack.scales, stack.codes if zeros is None else zeros,
        stack.scales if offsets is None else offsets, bias, order, starts, out,
        top_k, stack.experts, stack.n, stack.k, stack.codes.shape[1], stack.scales.shape[2], x.stride(0),
        stack.zero, low, high, *constants, zeros is not None, offsets is not None, stack.kind,
        stack.bits, stack.group, stack.half, tile.m, columns, held, takes_ptx(x.device), num_warps=tile.warps,
        num_stages=tile.stages,
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

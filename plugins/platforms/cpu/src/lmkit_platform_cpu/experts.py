"""Mixtures of experts: the rows of all tokens through the experts chosen for them in one native operator."""

from __future__ import annotations

import ctypes
from ctypes import c_int32, c_int64, c_void_p
from dataclasses import dataclass
from typing import Any

import torch
from lmkit.api import DeviceInfo, IntegerFormat, Integers, LinearSpec, QuantFormat, RowOps
from torch import Tensor
from torch.nn import functional as F

from lmkit_platform_cpu import integer, packed
from lmkit_platform_cpu.integer import IntegerLinear, PackedIntegers
from lmkit_platform_cpu.native import DTYPES, MISSING, Args, load
from lmkit_platform_cpu.packed import PANEL, Packed
from lmkit_platform_cpu.rowops import ACTIVATIONS, GATES


class Stack(ctypes.Structure):
    _fields_ = [
        *(
            (name, c_void_p)
            for name in ("weight", "scales", "zeros", "offsets", "table", "bias", "rows", "x_scales", "x_sums")
        ),
        ("chunk_ends", c_void_p),
        *((name, c_int64) for name in ("n", "k", "parts", "group", "block", "most_panels")),
        *((name, c_int32) for name in ("weight_dtype", "bits", "planes", "zero")),
    ]


class ExpertsArgs(Args):
    _fields_ = [
        *((name, Stack) for name in ("up", "down")),
        *((name, c_void_p) for name in ("x", "ids", "weights", "out", "middle", "products")),
        *((name, c_void_p) for name in ("ends", "places", "tokens_of")),
        *((name, c_int64) for name in ("tokens", "top_k", "experts", "x_stride")),
        *((name, c_int32) for name in ("dtype", "activation", "threads")),
    ]


@dataclass(frozen=True, slots=True)
class PackedExperts:
    """[experts][parts] weights [n, k] in whole panels."""

    weight: Packed | PackedIntegers
    experts: int
    parts: int  # of one expert: gate and up, or one
    n: int

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes


class NativeExperts:
    """See `lmkit.api.ExpertKernel`. An expert that is none (ids out of range, but -1) makes the token's result NaN."""

    name = "moe_native"
    skips = True
    packed_types = (PackedExperts, Packed, PackedIntegers)

    def __init__(self) -> None:
        self.native = load()

    def can_run(self, fmt: QuantFormat, layer: LinearSpec, device: DeviceInfo, act: str | None = None) -> str | None:
        known = GATES if len(layer.out_features) == 2 * layer.experts else ACTIVATIONS
        if act is not None and act not in known:
            return f"runs {', '.join(known)}, not {act}"
        if fmt.name == "plain":
            return MISSING if self.native is None else None
        if isinstance(fmt, IntegerFormat) and fmt.ordered:
            return "runs columns in their own order only"
        return IntegerLinear().can_run(fmt, layer, device)

    def pack(self, fmt: QuantFormat, params: dict[str, Tensor], layer: LinearSpec, dtype: torch.dtype) -> PackedExperts:
        assert self.native is not None
        n, blocks = layer.out_features[0], len(layer.out_features)
        if not isinstance(fmt, IntegerFormat):
            weight: Any = packed.pack(self.native, in_panels(params.pop("weight"), n), dtype)
        else:
            planes = 1 if fmt.activations == "int8" else 2
            if fmt.rounding:
                rows = in_panels(params.pop("weight"), n)
                weight = integer.round_and_pack(self.native, rows, fmt.bits, fmt.group, planes, fmt.rounding)
            else:
                found = fmt.integers(params)
                params.clear()
                zeros = in_panels(found.zeros, n) if isinstance(found.zeros, Tensor) else found.zeros
                offsets = None if found.offsets is None else in_panels(found.offsets, n)
                codes, scales = in_panels(found.codes, n), in_panels(found.scales, n)
                found = Integers(codes, scales, zeros, offsets=offsets, table=found.table)
                weight = integer.pack(self.native, found, fmt.bits, fmt.group, planes)
        return PackedExperts(weight, layer.experts, blocks // layer.experts, n)

    def apply(self, x: Tensor, ids: Tensor, weights: Tensor, up: Any, down: Any, act: str, rows: RowOps) -> Tensor:
        assert self.native is not None
        check(x, ids, weights, up, down)
        first, last = up.packed, down.packed
        x, ids, weights = packed.matrix(x, first.weight.k), ids.contiguous(), weights.contiguous()
        tokens, top_k = ids.shape
        out = torch.empty((tokens, last.n), dtype=x.dtype)
        if not tokens:
            return out
        choices = tokens * top_k
        indices = torch.empty(3 * first.experts + 2 * choices, dtype=torch.int64)
        middle, products = torch.empty(choices * first.n), torch.empty(choices * last.n)
        args = ExpertsArgs(
            x=x.data_ptr(), ids=ids.data_ptr(), weights=weights.data_ptr(), out=out.data_ptr(),
            middle=middle.data_ptr(), products=products.data_ptr(), tokens=tokens, top_k=top_k,
            experts=first.experts, x_stride=x.stride(0), dtype=DTYPES[str(x.dtype)],
            activation=(GATES if first.parts == 2 else ACTIVATIONS)[act], threads=self.native.threads,
        )  # fmt: skip
        args.ends = indices.data_ptr()
        args.up.chunk_ends = args.ends + 8 * first.experts
        args.down.chunk_ends = args.ends + 16 * first.experts
        args.places = args.ends + 24 * first.experts
        args.tokens_of = args.places + 8 * choices
        scratch = [fill(args.up, first, up.bias, choices), fill(args.down, last, down.bias, choices)]
        args.chunks[0] = 1  # which counts the others
        self.native.run("experts", args)
        del scratch
        return out


def in_panels(rows: Tensor, n: int) -> Tensor:
    """[blocks * n, k], each block's rows filled up to whole panels with zeros."""
    if n % PANEL == 0:
        return rows
    return F.pad(rows.view(-1, n, rows.shape[1]), (0, 0, 0, -n % PANEL)).flatten(0, 1)


def fill(args: Stack, experts: PackedExperts, bias: Tensor | None, choices: int) -> list[Tensor]:
    """Describes a stacked linear, with scratch for the rows it multiplies, which is returned."""
    weight = experts.weight
    args.weight, args.n, args.k, args.parts = weight.data.data_ptr(), experts.n, weight.k, experts.parts
    args.bias = None if bias is None else bias.data_ptr()
    if isinstance(weight, Packed):
        args.weight_dtype = DTYPES[str(weight.dtype)]
        scratch = [torch.empty(choices * weight.k)]
    else:
        args.scales = weight.scales.data_ptr()
        optional = (weight.zeros, weight.offsets, weight.table)
        args.zeros, args.offsets, args.table = (None if t is None else t.data_ptr() for t in optional)
        args.group, args.block = weight.group, weight.block
        args.bits, args.planes, args.zero = weight.bits, weight.planes, weight.zero
        blocks = -(-weight.k // weight.block)
        scratch = [
            torch.empty(choices * 2 * (-(-weight.k // 8) * 8), dtype=torch.int8),
            torch.empty(choices * blocks),
            torch.empty(choices * blocks, dtype=torch.int32),
        ]
        args.x_scales, args.x_sums = scratch[1].data_ptr(), scratch[2].data_ptr()
    args.rows = scratch[0].data_ptr()
    return scratch


def check(x: Tensor, ids: Tensor, weights: Tensor, up: Any, down: Any) -> None:
    """Raises ValueError for what the kernel does not take."""
    first, last = up.packed, down.packed
    fits = x.dim() == ids.dim() == 2 and x.shape[1] == first.weight.k and str(x.dtype) in DTYPES
    fits &= ids.shape == weights.shape and ids.shape[0] == x.shape[0]
    fits &= ids.dtype == torch.int64 and weights.dtype == x.dtype
    fits &= first.experts == last.experts and first.n == last.weight.k and last.parts == 1
    for linear in (up, down):
        experts = linear.packed
        fits &= not isinstance(experts.weight, Packed) or experts.weight.dtype == x.dtype
        if linear.bias is not None:
            size = experts.experts * experts.parts * experts.n
            fits &= linear.bias.shape == (size,) and linear.bias.dtype == x.dtype and linear.bias.is_contiguous()
    if not fits:
        shapes = ", ".join(f"{list(t.shape)} {t.dtype}" for t in (x, ids, weights))
        raise ValueError(f"{first.experts} experts of {first.weight.k} to {last.n} values got {shapes}")

"""Operators of torch that a tape can hold: what moves rows, computes value by value, or finds the largest of each row.

A function here takes what torch's operator takes, and gives None where the native kernels do not cover it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from ctypes import c_float, c_int32, c_int64, c_void_p
from math import inf, prod
from typing import Any

import torch
from torch import Tensor

from lmkit_platform_cpu.native import Args
from lmkit_platform_cpu.rowops import DTYPES, NativeRowOps

CHUNK = 1 << 15  # bytes of a chunk: some microseconds

aten = torch.ops.aten


class CopyArgs(Args):
    _fields_ = [
        ("x", c_void_p),
        ("out", c_void_p),
        *((name, c_int64) for name in ("rows", "size", "step", "x_row", "out_row")),
    ]


def copy(out: Tensor, x: Tensor, non_blocking: bool = False) -> Tensor | None:
    if out.shape != x.shape or out.dtype != x.dtype:
        return None
    source, target = _rows(x), _rows(out)
    if source is None or target is None:
        return None
    num, size = source.shape[0], source.shape[1] * source.itemsize
    args = CopyArgs(
        x=source.data_ptr(), out=target.data_ptr(), rows=num, size=size, step=max(1, CHUNK // max(1, size)),
        x_row=source.stride(0) * source.itemsize, out_row=target.stride(0) * target.itemsize,
    )  # fmt: skip
    args.chunks[0] = -(-num // args.step)
    NativeRowOps().native.run("copy_rows", args)
    return out


def clone(x: Tensor, memory_format: object = None) -> Tensor | None:
    return copy(x.new_empty(x.shape), x)


def cat(tensors: Sequence[Tensor], dim: int = 0) -> Tensor | None:
    first, dim = tensors[0], dim % tensors[0].dim()
    others = [size for i, size in enumerate(first.shape) if i != dim]
    if any(t.dtype != first.dtype or [n for i, n in enumerate(t.shape) if i != dim] != others for t in tensors):
        return None
    sizes = [t.shape[dim] for t in tensors]
    shape = list(first.shape)
    shape[dim] = sum(sizes)
    out = first.new_empty(shape)
    done = [copy(part, t) for part, t in zip(out.split(sizes, dim), tensors, strict=True)]
    return None if any(part is None for part in done) else out


def index(x: Tensor, indices: Sequence[Tensor | None]) -> Tensor | None:
    """Rows of `x`, or entries of a table; one that is not there is NaN, or -1 of a table of integers."""
    (at,) = indices if len(indices) == 1 else (None,)
    table = x.unsqueeze(1) if x.dim() == 1 else x
    if at is None or at.dtype != torch.int64 or not at.is_contiguous() or table.dim() != 2 or not table.is_contiguous():
        return None
    return NativeRowOps().embed(at.flatten(), table).view(*at.shape, *x.shape[1:])


class EachArgs(Args):
    _fields_ = [
        *((name, c_void_p) for name in ("x", "y", "out")),
        *((name, c_int64) for name in ("rows", "size", "step", "x_row", "y_row", "x_value", "y_value")),
        *((name, c_int32) for name in ("x_dtype", "y_dtype", "dtype", "what")),
        *((name, c_float) for name in ("low", "high")),
    ]


AS_IT_IS, EXP, SIGMOID, SOFTPLUS, CLAMP, PRODUCT, SUM, SCALED = range(8)  # as in rowops.inc


def each(
    what: int, x: Tensor, y: Tensor | None = None, dtype: torch.dtype | None = None, low: float = 0, high: float = 0
) -> Tensor | None:
    """Value by value, shapes broadcast as torch does; computed in float32 and rounded once, to `dtype`."""
    shape = x.shape if y is None else torch.broadcast_shapes(x.shape, y.shape)
    given = [x, x if y is None else y]
    dtype = dtype or (x.dtype if given[1].dtype == x.dtype else torch.float32)
    if {dtype, *(t.dtype for t in given)} - DTYPES.keys() or not all(t.dim() for t in given) or not prod(shape):
        return None
    (first, second), axes = [t.expand(shape) for t in given], range(len(shape))
    for axis in axes:  # rows as long as they can be
        found = [(_distance(t, range(axis)), _distance(t, axes[axis:])) for t in (first, second)]
        if all(row is not None and value in (0, 1) for row, value in found):
            break
    else:
        return None
    (x_row, x_value), (y_row, y_value) = found
    out, size = torch.empty(shape, dtype=dtype), prod(shape[axis:])
    args = EachArgs(
        x=first.data_ptr(), y=second.data_ptr(), out=out.data_ptr(), rows=prod(shape[:axis]), size=size,
        step=max(1, CHUNK // (4 * size)), x_row=x_row, y_row=y_row, x_value=x_value, y_value=y_value,
        x_dtype=DTYPES[x.dtype], y_dtype=DTYPES[second.dtype], dtype=DTYPES[dtype], what=what, low=low, high=high,
    )  # fmt: skip
    args.chunks[0] = -(-args.rows // args.step)
    NativeRowOps().native.run("each", args)
    return out


def _distance(x: Tensor, axes: range) -> int | None:
    """Values between neighbours when these axes are one; None where it is not the same everywhere."""
    found = [(x.shape[i], x.stride(i)) for i in axes if x.shape[i] > 1]
    if any(stride != inner * size for (_, stride), (size, inner) in itertools.pairwise(found)):
        return None
    return found[-1][1] if found else 0


def add(x: Tensor, y: Tensor | float, alpha: float = 1) -> Tensor | None:
    return each(SUM, x, y) if isinstance(y, Tensor) and alpha == 1 else None


def mul(x: Tensor, y: Tensor | float) -> Tensor | None:
    return each(PRODUCT, x, y) if isinstance(y, Tensor) else each(SCALED, x, low=y)


def to_copy(x: Tensor, dtype: torch.dtype | None = None, **others: object) -> Tensor | None:
    others.pop("non_blocking", None)
    return None if any(others.values()) else each(AS_IT_IS, x, dtype=dtype or x.dtype)


def clamp(x: Tensor, low: float | None = None, high: float | None = None) -> Tensor | None:
    return each(CLAMP, x, low=-inf if low is None else low, high=inf if high is None else high)


def softplus(x: Tensor, beta: float = 1, threshold: float = 20) -> Tensor | None:
    return each(SOFTPLUS, x) if (beta, threshold) == (1, 20) else None


def silu(x: Tensor) -> Tensor | None:
    rows = _rows(x)
    return None if rows is None or x.dtype not in DTYPES else NativeRowOps().activate(rows, "silu").view(x.shape)


def argmax(x: Tensor, dim: int | None = None, keepdim: bool = False) -> Tensor | None:
    """The first of the largest values; 0 where there is one that is not finite."""
    if x.dim() != 2 or dim not in (1, -1) or x.dtype not in DTYPES or _rows(x) is None or not x.shape[1]:
        return None
    token, _ = NativeRowOps().argmax(x)
    return token.unsqueeze(1) if keepdim else token


MOVES: dict[Any, Callable[..., Tensor | None]] = {
    aten.copy_.default: copy,
    aten.clone.default: clone,
    aten._unsafe_view.default: lambda x, shape: x.view(shape),
    aten.cat.default: cat,
    aten.index.Tensor: index,
    aten.add.Tensor: add,
    aten.mul.Tensor: mul,
    aten.neg.default: lambda x: each(SCALED, x, low=-1),
    aten._to_copy.default: to_copy,
    aten.clamp.default: clamp,
    aten.exp.default: lambda x: each(EXP, x),
    aten.sigmoid.default: lambda x: each(SIGMOID, x),
    aten.softplus.default: softplus,
    aten.silu.default: silu,
    aten.argmax.default: argmax,
}


def _rows(x: Tensor) -> Tensor | None:
    """`x` as rows of values that lie side by side; None where they do not."""
    x = x.unsqueeze(1) if x.dim() == 1 else x
    if x.is_contiguous() and x.dim() > 2:
        x = x.flatten(1)
    return x if x.dim() == 2 and (x.stride(1) == 1 or x.shape[1] == 1) else None

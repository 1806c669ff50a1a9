"""Operators of torch that a tape can hold: what moves rows, adds them, or finds the largest value of each.

A function here takes what torch's operator takes, and gives None where the native kernels do not cover it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from ctypes import c_int64, c_void_p
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


def add(x: Tensor, y: Tensor | float, alpha: float = 1) -> Tensor | None:
    if (
        not isinstance(y, Tensor)
        or x.dim() != 2
        or y.shape != x.shape
        or y.dtype != x.dtype
        or x.dtype not in DTYPES
        or alpha != 1
    ):
        return None
    out = clone(x)
    return None if out is None or _rows(y) is None else NativeRowOps().add(out, y, y)


def argmax(x: Tensor, dim: int | None = None, keepdim: bool = False) -> Tensor | None:
    """The first of the largest values; 0 where there is one that is not finite."""
    if x.dim() != 2 or dim not in (1, -1) or x.dtype not in DTYPES or _rows(x) is None or not x.shape[1]:
        return None
    token, _ = NativeRowOps().argmax(x)
    return token.unsqueeze(1) if keepdim else token


MOVES: dict[Any, Callable[..., Tensor | None]] = {
    aten.copy_.default: copy,
    aten.clone.default: clone,
    aten.cat.default: cat,
    aten.index.Tensor: index,
    aten.add.Tensor: add,
    aten.argmax.default: argmax,
}


def _rows(x: Tensor) -> Tensor | None:
    """`x` as rows of values that lie side by side; None where they do not."""
    x = x.unsqueeze(1) if x.dim() == 1 else x
    if x.is_contiguous() and x.dim() > 2:
        x = x.flatten(1)
    return x if x.dim() == 2 and (x.stride(1) == 1 or x.shape[1] == 1) else None

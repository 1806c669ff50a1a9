"""bfloat16 and float8 in Triton's interpreter, as on a GPU.

It keeps bfloat16 as integers, and then multiplies those; here it is widened to float32, computed, and rounded to
nearest even. Rounding to float8 it loses the carry into the exponent (0.4993 becomes 0.25); here torch rounds. What
takes part is patched within `right_numbers()` only.
"""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Any

import numpy as np
import torch

from lmkit_testing.triton_quick import quick

BITWISE = {np.bitwise_and, np.bitwise_or, np.bitwise_xor, np.left_shift, np.right_shift}


def interpreted(module: str) -> ModuleType:
    """A module of kernels that run in the interpreter.

    Triton decides that when it is imported, for the functions of its own language too: TRITON_INTERPRET=1 is in the
    environment of the whole process, or nothing works.
    """
    found = import_module(module)
    compiled = [name for name, value in vars(found).items() if type(value).__name__ == "JITFunction"]
    assert not compiled, f"{module}: {compiled[0]} is compiled; set TRITON_INTERPRET=1 before Python starts"
    return found


def widened(bits: np.ndarray) -> np.ndarray:
    """uint16 as float32."""
    wide: np.ndarray = (np.ascontiguousarray(bits).astype(np.uint32) << np.uint32(16)).view(np.float32)
    return wide


def rounded(values: np.ndarray) -> np.ndarray:
    """float32 as uint16, to nearest even."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    up = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), up.astype(np.uint16))


class _Arithmetic:
    """The patched operations. Each falls back to the interpreter's own where no bfloat16 takes part."""

    def __init__(self, interpreter: Any, language: Any) -> None:
        self.interpreter, self.bfloat16, self.float32 = interpreter, language.bfloat16, language.float32
        self.float8 = {language.float8e4nv: torch.float8_e4m3fn, language.float8e5: torch.float8_e5m2}
        builder, reduce = interpreter.InterpreterBuilder, interpreter.ReduceOps
        self.own = {
            name: getattr(owner, name)
            for owner, names in ((builder, self.OF_BUILDER), (reduce, self.OF_REDUCE)) for name in names
        }  # fmt: skip

    OF_BUILDER = ("binary_op", "unary_op", "create_dot", "create_fma", "cast_impl", "create_fp_to_fp", "ternary_op")
    OF_REDUCE = ("sum", "min_max")

    def is_narrow(self, handle: Any) -> bool:
        return isinstance(handle, self.interpreter.TensorHandle) and handle.dtype.scalar == self.bfloat16

    def up(self, handle: Any) -> Any:
        if not self.is_narrow(handle):
            return handle
        return self.interpreter.TensorHandle(widened(handle.data), self.float32)

    def down(self, values: np.ndarray) -> Any:
        return self.interpreter.TensorHandle(rounded(np.asarray(values, np.float32)), self.bfloat16)

    def patches(self) -> Iterator[tuple[type, str, Any]]:
        arithmetic, own = self, self.own

        def binary_op(self: Any, a: Any, b: Any, op: Any) -> Any:
            if not (arithmetic.is_narrow(a) and arithmetic.is_narrow(b)) or op in BITWISE:
                return own["binary_op"](self, a, b, op)
            out = op(arithmetic.up(a).data, arithmetic.up(b).data)
            if out.dtype == np.bool_:
                return arithmetic.interpreter.TensorHandle(out, arithmetic.bfloat16)
            return arithmetic.down(out)

        def unary_op(self: Any, a: Any, op: Any) -> Any:
            return (
                arithmetic.down(op(arithmetic.up(a).data)) if arithmetic.is_narrow(a) else own["unary_op"](self, a, op)
            )

        def create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
            return own["create_dot"](self, arithmetic.up(a), arithmetic.up(b), *rest)

        def create_fma(self: Any, x: Any, y: Any, z: Any) -> Any:
            if not arithmetic.is_narrow(z):
                return own["create_fma"](self, x, y, z)
            x, y, z = (arithmetic.up(each).data for each in (x, y, z))
            return arithmetic.down((x.astype(np.float64) * y + z).astype(np.float32))

        def cast_impl(self: Any, source: Any, target: Any) -> Any:
            if arithmetic.is_narrow(source):
                wide = arithmetic.up(source)
                if target.scalar == arithmetic.bfloat16:
                    return source
                return wide if target.scalar == arithmetic.float32 else own["cast_impl"](self, wide, target)
            if target.scalar == arithmetic.bfloat16:
                return arithmetic.down(source.data.astype(np.float32))
            return own["cast_impl"](self, source, target)

        def create_fp_to_fp(self: Any, source: Any, target: Any, rounding: Any) -> Any:
            small = arithmetic.float8.get(target.scalar)
            if small is None or source.dtype.scalar in arithmetic.float8:
                return own["create_fp_to_fp"](self, source, target, rounding)
            values = torch.from_numpy(np.ascontiguousarray(arithmetic.up(source).data).astype(np.float32))
            bits = values.to(small).view(torch.uint8).numpy()
            return arithmetic.interpreter.TensorHandle(bits.reshape(source.data.shape), target.scalar)

        def ternary_op(self: Any, a: Any, b: Any, c: Any, op: Any) -> Any:
            if arithmetic.is_narrow(c) and op is np.clip:
                return arithmetic.down(np.clip(*(arithmetic.up(each).data for each in (a, b, c))))
            return own["ternary_op"](self, a, b, c, op)

        def lifted(self: Any, tensor: Any) -> Any:
            return self.to_tensor(arithmetic.up(tensor.handle).data, arithmetic.float32)

        def lowered(self: Any, tensor: Any) -> Any:
            bits = rounded(tensor.handle.data)
            return self.to_tensor(bits if bits.shape != (1,) else bits[0], arithmetic.bfloat16)

        def reduce_sum(self: Any, tensor: Any) -> Any:
            if tensor.dtype.scalar != arithmetic.bfloat16:
                return own["sum"](self, tensor)
            return lowered(self, own["sum"](self, lifted(self, tensor)))

        def min_max(self: Any, tensor: Any, val_reduce_op: Any = None, idx_reduce_op: Any = None) -> Any:
            first = tensor[0] if isinstance(tensor, tuple) else tensor
            if first.dtype.scalar != arithmetic.bfloat16:
                return own["min_max"](self, tensor, val_reduce_op, idx_reduce_op)
            found = own["min_max"](self, lifted(self, first), val_reduce_op, idx_reduce_op)
            if isinstance(found, tuple):
                return lowered(self, found[0]), found[1]
            return lowered(self, found) if val_reduce_op else found

        builder, reduce = self.interpreter.InterpreterBuilder, self.interpreter.ReduceOps
        for function in (binary_op, unary_op, create_dot, create_fma, cast_impl, create_fp_to_fp, ternary_op):
            yield builder, function.__name__, function
        yield reduce, "sum", reduce_sum
        yield reduce, "min_max", min_max


@cache
def _unburdened() -> None:
    """The interpreter makes millions of objects, and each full collection would look at all those of torch's, too."""
    gc.collect()
    gc.freeze()


_active: list[bool] = []


@contextlib.contextmanager
def right_numbers() -> Iterator[None]:
    """May be nested. Without Triton it does nothing. Infinities and NaN come and go in silence, as on a device."""
    if _active or "triton" not in sys.modules:
        yield
        return
    import triton.language
    import triton.runtime.interpreter

    _unburdened()
    with contextlib.ExitStack() as undo:
        for owner, name, patch in _Arithmetic(triton.runtime.interpreter, triton.language).patches():
            undo.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, patch)
        undo.enter_context(np.errstate(all="ignore"))
        undo.enter_context(quick(triton.runtime.interpreter, triton.language))
        _active.append(True)
        undo.callback(_active.pop)
        yield

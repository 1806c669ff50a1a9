"""Triton's interpreter without what it does again and again: most of a small launch's time, and no part of its answer.

It turns its language into that of numpy at each call of a function from another one, looks numbers' types up in a table
made anew, and checks sums and products for overflow by a dozen operations of its own. Here the first is done once a
launch, the second by name, and the check is three operations of numpy.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import numpy as np

EXACT = {"add": np.add, "sub": np.subtract, "mul": np.multiply}


@contextlib.contextmanager
def quick(interpreter: Any, language: Any) -> Iterator[None]:
    """Patches the module `triton.runtime.interpreter`; `language` is `triton.language`."""
    semantic = interpreter.interpreter_semantic
    patches = {"_get_np_dtype": _types(interpreter, language)}
    if hasattr(interpreter, "_LangPatchScope"):
        patches["_patch_lang"] = _once_a_launch(interpreter, language)
    before = {name: getattr(interpreter, name) for name in patches}
    vars(interpreter).update(patches)
    semantic.binary_op_sanitize_overflow_impl = _in_range(semantic)
    try:
        yield
    finally:
        vars(interpreter).update(before)
        del semantic.binary_op_sanitize_overflow_impl


def _types(interpreter: Any, language: Any) -> Callable[[Any], np.dtype]:
    """By the name of a type, which a table of the interpreter's own would have to compare with every other."""
    own, known, pointer = interpreter._get_np_dtype, {}, np.dtype(np.uint64)

    def of(dtype: Any) -> np.dtype:
        scalar = dtype.element_ty if isinstance(dtype, language.block_type) else dtype
        if isinstance(scalar, language.pointer_type):
            return pointer
        if scalar.name not in known:
            known[scalar.name] = own(scalar)
        return known[scalar.name]

    return of


def _once_a_launch(interpreter: Any, language: Any) -> Callable[[Any], Any]:
    """A function that a kernel calls finds what the kernel's own launch has patched, until that is undone."""
    own, nothing = interpreter._patch_lang, interpreter._LangPatchScope()
    patched: set[str] = set()

    @cache
    def named(fn: Any) -> frozenset[str]:
        """The modules that `own` looks for."""
        modules = [value for value in fn.__globals__.values() if inspect.ismodule(value)]
        return frozenset(module.__name__ for module in modules if module in (language, language.core))

    def patch(fn: Any) -> Any:
        if patched >= named(fn) != frozenset():
            return nothing
        scope, first = own(fn), not patched
        patched.update(named(fn))
        if first:
            restore = scope.restore

            def done() -> None:
                patched.clear()
                restore()

            scope.restore = done
        return scope

    return patch


def _in_range(semantic: Any) -> Callable[[Any, Any, Any], None]:
    def check(lhs: Any, rhs: Any, operation: Any) -> None:
        scalar = lhs.type.scalar
        if scalar.int_bitwidth >= 64 or not semantic.builder.options.sanitize_overflow:
            return
        exact = EXACT[operation.__name__](lhs.handle.data.astype(np.int64), rhs.handle.data.astype(np.int64))
        fits = exact.min() >= scalar.get_int_min_value() and exact.max() <= scalar.get_int_max_value()
        assert fits, f"int{scalar.int_bitwidth} overflow detected for operation {operation.__name__}"

    return check

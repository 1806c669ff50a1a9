"""Registers linears by CUTLASS. Light: the kernels are imported when they are chosen."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from lmkit.api import OpSpec, Range, Tier, hookimpl

COMMON: dict[str, Any] = {
    "op": "linear",
    "requires": ("nvidia-cutlass-dsl>=4.8",),
    "tier": Tier.OPTIMIZED,
    "stability": "experimental",  # no GPU has run them
    "platforms": ("cuda",),
    "dtypes": frozenset({"bfloat16", "float16"}),
}


@hookimpl
def lmkit_ops() -> Iterable[OpSpec]:
    yield OpSpec(
        name="linear_cutlass",
        summary="Linears in 16 bits by the tensor cores of Hopper and Blackwell, in the CuTe DSL",
        target="lmkit_op_cutlass.linear:CutlassLinear",
        capability=Range((9, 0), (10, 1)),
        formats=frozenset({"plain"}),
        **COMMON,
    )
    yield OpSpec(
        name="fp8_cutlass",
        summary="Linears over float8 weights and activations, with scales by row or by 128 columns, in the CuTe DSL",
        target="lmkit_op_cutlass.linear:CutlassFp8",
        capability=Range((9, 0), (10, 1)),
        formats=frozenset({"fp8"}),
        bits=8,
        **COMMON,
    )
    yield OpSpec(
        name="int4_cutlass",
        summary="Linears over weights of 4 bits, widened in registers, in the CuTe DSL; for Hopper",
        target="lmkit_op_cutlass.linear:CutlassInt4",
        capability=Range((9, 0), (9, 1)),
        formats=frozenset({"int4"}),
        bits=4,
        **COMMON,
    )

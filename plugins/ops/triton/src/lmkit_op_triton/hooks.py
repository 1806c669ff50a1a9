"""Registers operators by Triton. Light: the kernels are imported when they are chosen."""

from __future__ import annotations

from collections.abc import Iterable

from lmkit.api import OpSpec, Tier, hookimpl


@hookimpl
def lmkit_ops() -> Iterable[OpSpec]:
    yield OpSpec(
        name="rowwise_triton",
        summary="Norms, activations, rotary positions, embedding and sampling by Triton kernels, without waiting",
        target="lmkit_op_triton.rowops:TritonRowOps",
        requires=("triton>=3.2",),
        tier=Tier.OPTIMIZED,
        op="rowwise",
        platforms=("cuda", "rocm"),
    )
    yield OpSpec(
        name="moe_triton",
        summary="Mixtures of experts in four launches by Triton kernels, without waiting",
        target="lmkit_op_triton.moe:TritonExperts",
        requires=("triton>=3.2",),
        tier=Tier.OPTIMIZED,
        op="moe",
        formats=frozenset({"plain", "int8", "w8a8", "int4", "mxfp4", "nvfp4", "nf4", "fp4"}),
        platforms=("cuda", "rocm"),
    )

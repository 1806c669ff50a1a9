"""Registers operators by Triton. Light: the kernels are imported when they are chosen."""

from __future__ import annotations

from collections.abc import Iterable

from lmkit.api import OpSpec, Range, Tier, hookimpl


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
        capability=Range((8, 0), None),
    )
    yield OpSpec(
        name="moe_triton",
        summary="Mixtures of experts in four launches by Triton kernels, without waiting",
        target="lmkit_op_triton.moe:TritonExperts",
        requires=("triton>=3.2",),
        tier=Tier.OPTIMIZED,
        op="moe",
        formats=frozenset({"plain", "int8", "w8a8", "int4", "mxfp4", "nvfp4", "nf4", "fp4", "fp8"}),
        platforms=("cuda", "rocm"),
        capability=Range((8, 0), None),
    )
    yield OpSpec(
        name="plain_triton",
        summary="linears over weights as they are: up to 16 rows by Triton kernels that read each weight once",
        target="lmkit_op_triton.plain:TritonPlainLinear",
        requires=("triton>=3.2",),
        tier=Tier.OPTIMIZED,
        op="linear",
        formats=frozenset({"plain"}),
        platforms=("cuda",),
        capability=Range((9, 0), (9, 1)),  # where it was measured beside cuBLAS
    )
    yield OpSpec(
        name="linear_triton",
        summary="linears over weights of 8 or 4 bits by Triton kernels; with w8a8 activations become 8 bits, too",
        target="lmkit_op_triton.linear:TritonLinear",
        requires=("triton>=3.2",),
        tier=Tier.OPTIMIZED,
        op="linear",
        formats=frozenset({"int8", "w8a8", "int4", "mxfp4", "nvfp4", "nf4", "fp4"}),
        platforms=("cuda", "rocm"),
        capability=Range((8, 0), None),
    )
    yield OpSpec(
        name="fp8_triton",
        summary="linears over float8 weights by Triton kernels, activations rounded as the checkpoint says, or left",
        target="lmkit_op_triton.linear:TritonFloat8Linear",
        requires=("triton>=3.2",),
        tier=Tier.OPTIMIZED,
        op="linear",
        formats=frozenset({"fp8"}),
        platforms=("cuda", "rocm"),
        capability=Range((8, 0), None),
        bits=8,
    )
    yield OpSpec(
        name="recurrent_triton",
        summary="Scans, delta rules and convolutions of recurrent layers by Triton kernels: one launch, or two",
        target="lmkit_op_triton.recurrent:TritonRecurrentOps",
        requires=("triton>=3.2",),
        tier=Tier.OPTIMIZED,
        op="recurrent",
        platforms=("cuda", "rocm"),
    )

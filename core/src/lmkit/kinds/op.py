"""Kernels of one operation: `op="linear"` runs a weight format on a device.

Example, entry point `[project.entry-points."lmkit.op"] toy_linear = "toy_ops.hooks"`::

    from lmkit.api import OpSpec, Tier, hookimpl


    @hookimpl
    def lmkit_ops():
        yield OpSpec(
            name="toy_linear", summary="Linear for toy4 weights", target="toy_ops.linear:ToyLinear",
            op="linear", formats=frozenset({"toy4_packed"}), tier=Tier.OPTIMIZED,
        )
"""

from __future__ import annotations

from dataclasses import dataclass

from lmkit.contracts.refusal import Refusal
from lmkit.contracts.specs import SelectRequest, Spec
from lmkit.kinds.base import Kind, Refusals, listed


@dataclass(frozen=True, slots=True, kw_only=True)
class OpSpec(Spec):
    """target: a kernel class for `op` ("linear", "moe", ...)."""

    op: str
    formats: frozenset[str] = frozenset()  # weight formats it runs; empty = any that can be dequantized
    dtypes: frozenset[str] = frozenset({"bfloat16", "float16", "float32"})
    bits: float | None = None  # of a packed weight, for plans, where it takes fewer than its type has


@dataclass(frozen=True, slots=True, kw_only=True)
class OpRequest(SelectRequest):
    """`format` is the weight format to run ("plain" = unquantized)."""

    kind: str = "op"
    op: str
    format: str = "plain"


def refusals(spec: OpSpec, request: OpRequest) -> Refusals:
    if spec.op != request.op:
        yield Refusal("format", f"op {spec.op}", request.op)
    if spec.formats and request.format not in spec.formats:
        yield Refusal("format", listed(spec.formats), request.format)
    if request.dtype is not None and request.dtype not in spec.dtypes:
        yield Refusal("dtype", listed(spec.dtypes), request.dtype)


KIND = Kind(
    "op",
    spec=OpSpec,
    hook="lmkit_ops",
    used_by="lmkit_worker.loading.load",
    request=OpRequest,
    refusals=refusals,
    needs=("quantization",),
    setting="op",
    words="auto, or names of kernels ('a,b'): what one of them can be for runs on no others",
    doc=__doc__,
)

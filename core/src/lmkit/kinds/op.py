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

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from lmkit.contracts.refusal import Refusal
from lmkit.contracts.specs import SelectRequest, Spec
from lmkit.kinds.base import Kind, Known, Refusals, listed

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from lmkit.contracts.device import DeviceInfo
    from lmkit.contracts.model import LinearSpec
    from lmkit.contracts.operators import QuantFormat, RowOps


class PackedWeight(Protocol):
    """A weight as its kernel wants it."""

    @property
    def nbytes(self) -> int: ...


class LinearKernel(Protocol):
    """One way to run a format on a device.

    A kernel whose packed weights may be kept on disk names their types in `packed_types`: dataclasses of tensors, plain
    values and each other. A kernel that is much slower than plain weights says why in `caution`, which becomes a
    warning when a model is loaded.
    """

    name: str

    def can_run(self, fmt: QuantFormat, layer: LinearSpec, device: DeviceInfo) -> str | None: ...

    def pack(self, fmt: QuantFormat, params: dict[str, Tensor], layer: LinearSpec, dtype: torch.dtype) -> PackedWeight:
        """Takes ownership of `params` and frees what it does not keep. They may map files: what is written to them is
        lost."""

    def apply(self, x: Tensor, weight: PackedWeight, bias: Tensor | None) -> Tensor:
        """x [..., in] -> [..., out]."""


class ExpertKernel(Protocol):
    """One way to run the experts of a mixture on a device."""

    name: str

    def can_run(self, fmt: QuantFormat, layer: LinearSpec, device: DeviceInfo, act: str | None = None) -> str | None:
        """A reason why not, or None; asked for each of the two stacked linears (`layer.experts` > 0).

        `act` is the activation that follows the linear: None for the second one.
        """

    def pack(self, fmt: QuantFormat, params: dict[str, Tensor], layer: LinearSpec, dtype: torch.dtype) -> PackedWeight:
        """A stacked linear [experts * out, in], as LinearKernel.pack."""

    def apply(self, x: Tensor, ids: Tensor, weights: Tensor, up: Any, down: Any, act: str, rows: RowOps) -> Tensor:
        """x [T, D], chosen experts `ids` [T, K] int64 and their `weights` [T, K] in the dtype of x -> [T, D].

        Each token's result is the weighted sum over its experts of down(act(gate) * up), or of down(act(up)) where an
        expert has one part. `up` and `down` have `spec` (of all ranks), `packed` (made by `pack`) and `bias`
        ([experts * out] or None). Where experts are dealt out, -1 is one that another rank has: it adds nothing, and is
        not computed. A kernel that knows this has a true `skips`; others are not asked.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class OpSpec(Spec):
    """target: a kernel class for `op` ("linear", "moe", ...)."""

    op: str
    formats: frozenset[str] = frozenset()  # weight formats it runs; empty = any that can be dequantized
    dtypes: frozenset[str] = frozenset({"bfloat16", "float16", "float32"})
    bits: float | Mapping[str, float] | None = None  # of a packed weight, also by format: for plans, where few are


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


def ask(known: Known) -> list[OpRequest]:
    """One for each format that the weights may be in, of experts too where there are any, and the row-wise operators'
    and those of recurrent layers.

    Each is a choice of its own.
    """
    ops = ("linear", "moe") if any(linear.experts for linear in known.info.linears) else ("linear",)
    rest = ("rowwise", "recurrent") if known.info.recurrent else ("rowwise",)
    parts = [(op, fmt, f"{op}:{fmt}") for fmt in known.formats for op in ops] + [(op, "plain", op) for op in rest]
    return [
        OpRequest(op=op, format=fmt, component=component, device=known.device, dtype=known.dtype)
        for op, fmt, component in parts
    ]


KIND = Kind(
    "op",
    spec=OpSpec,
    hook="lmkit_ops",
    used_by="lmkit_worker.loading.load",
    request=OpRequest,
    refusals=refusals,
    needs=("quantization",),
    ask=ask,
    setting="op",
    words="auto, or names of kernels ('a,b'): what one of them can be for runs on no others",
    doc=__doc__,
)

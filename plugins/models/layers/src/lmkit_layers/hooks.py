"""Registers the reference operators, which run everywhere."""

from __future__ import annotations

from collections.abc import Iterable

from lmkit.api import OpSpec, Tier, hookimpl


@hookimpl
def lmkit_ops() -> Iterable[OpSpec]:
    yield OpSpec(
        name="linear_reference",
        summary="Any weight format, dequantized; the oracle of linear kernels",
        target="lmkit_layers.linear:ReferenceLinear",
        tier=Tier.REFERENCE,
        stability="stable",
        op="linear",
    )
    yield OpSpec(
        name="rowwise_torch",
        summary="Norms, activations and rotary positions in plain torch; the oracle of row-wise operators",
        target="lmkit_layers.rowwise:TorchRowOps",
        tier=Tier.REFERENCE,
        stability="stable",
        op="rowwise",
    )

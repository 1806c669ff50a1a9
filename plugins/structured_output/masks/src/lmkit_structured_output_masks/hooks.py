"""Registers `masks`."""

from collections.abc import Iterable

from lmkit.api import StructuredOutputSpec, Tier, hookimpl


@hookimpl
def lmkit_structured_outputs() -> Iterable[StructuredOutputSpec]:
    yield StructuredOutputSpec(
        name="masks",
        summary="Grammars compiled beside the engine, and a mask for each row and step",
        target="lmkit_structured_output_masks.output:constrained_output",
        tier=Tier.OPTIMIZED,
        stability="stable",
    )

"""Registers the operators of recurrent layers in plain torch."""

from collections.abc import Iterable

from lmkit.api import OpSpec, Tier, hookimpl


@hookimpl
def lmkit_ops() -> Iterable[OpSpec]:
    yield OpSpec(
        name="recurrent_torch",
        summary="Scans, delta rules and convolutions of recurrent layers in plain torch; their oracle",
        target="lmkit_decoders.recurrent:TorchRecurrentOps",
        tier=Tier.REFERENCE,
        stability="stable",
        op="recurrent",
    )

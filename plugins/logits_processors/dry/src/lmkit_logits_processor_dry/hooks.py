"""Registers `dry`."""

from collections.abc import Iterable

from lmkit.api import LogitsProcessorSpec, Tier, hookimpl


@hookimpl
def lmkit_logits_processors() -> Iterable[LogitsProcessorSpec]:
    yield LogitsProcessorSpec(
        name="dry",
        summary="The longer a run has been said before, the less likely is its next token",
        target="lmkit_logits_processor_dry.processor:Dry",
        tier=Tier.OPTIMIZED,
    )

"""Registers `allowed_token_ids` and `bad_words`."""

from collections.abc import Iterable

from lmkit.api import LogitsProcessorSpec, Tier, hookimpl


@hookimpl
def lmkit_logits_processors() -> Iterable[LogitsProcessorSpec]:
    yield LogitsProcessorSpec(
        name="allowed_token_ids",
        summary="No tokens but these",
        target="lmkit_logits_processor_words.processors:AllowedTokens",
        tier=Tier.OPTIMIZED,
    )
    yield LogitsProcessorSpec(
        name="bad_words",
        summary="None of these runs of tokens",
        target="lmkit_logits_processor_words.processors:BadWords",
        tier=Tier.OPTIMIZED,
    )

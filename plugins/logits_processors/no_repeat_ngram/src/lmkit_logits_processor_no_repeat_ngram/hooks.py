"""Registers `no_repeat_ngram`."""

from collections.abc import Iterable

from lmkit.api import LogitsProcessorSpec, Tier, hookimpl


@hookimpl
def lmkit_logits_processors() -> Iterable[LogitsProcessorSpec]:
    yield LogitsProcessorSpec(
        name="no_repeat_ngram",
        summary="No run of so many tokens comes twice",
        target="lmkit_logits_processor_no_repeat_ngram.processor:NoRepeatNgram",
        tier=Tier.OPTIMIZED,
    )

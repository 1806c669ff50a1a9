"""Registers the logits processor `budget`. Light: its module is imported once a request asks for it."""

from lmkit.api import LogitsProcessorSpec, hookimpl


@hookimpl
def lmkit_logits_processors():
    yield LogitsProcessorSpec(
        name="budget",
        interface=1,
        summary="After so many tokens of an answer it goes on with given ones: an end to long thoughts",
        target="lmkit_logits_processor_budget.processor:Budget",
    )

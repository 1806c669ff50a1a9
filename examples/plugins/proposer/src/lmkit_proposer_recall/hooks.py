"""Registers the proposer `recall` and its options."""

from dataclasses import dataclass

from lmkit.api import ProposerSpec, hookimpl


@dataclass(frozen=True, slots=True)
class Options:
    """--proposer.recall.context and so on."""

    context: int = 3  # tokens by which a text is recognized
    remembered: int = 1 << 18  # runs of tokens whose successor is known; the oldest are forgotten

    def __post_init__(self):
        if not 1 <= self.context <= 16:
            raise ValueError(f"context is {self.context}, needs 1 to 16 tokens")
        if self.remembered < 1:
            raise ValueError(f"remembered is {self.remembered}, needs at least 1")


@hookimpl
def lmkit_proposers():
    yield ProposerSpec(
        name="recall",
        interface=1,
        summary="What followed the last tokens when any request of this engine had them",
        target="lmkit_proposer_recall.proposer:Recall",
        options="lmkit_proposer_recall.hooks:Options",
    )

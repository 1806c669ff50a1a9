"""Registers the proposer `ngram`."""

from collections.abc import Iterable
from dataclasses import dataclass

from lmkit.api import ProposerSpec, Tier, hookimpl


@dataclass(frozen=True, slots=True)
class Options:
    """Options of proposer.ngram."""

    longest: int = 4  # last tokens that are looked up first
    shortest: int = 2  # fewer are not looked up

    def __post_init__(self) -> None:
        if not 1 <= self.shortest <= self.longest <= 64:
            raise ValueError(
                f"shortest is {self.shortest} and longest {self.longest}, needs 1 <= shortest <= longest <= 64"
            )


@hookimpl
def lmkit_proposers() -> Iterable[ProposerSpec]:
    yield ProposerSpec(
        name="ngram",
        summary="What followed the last tokens where they stood before",
        target="lmkit_proposer_ngram.proposer:Ngram",
        options="lmkit_proposer_ngram.hooks:Options",
        tier=Tier.OPTIMIZED,
    )

"""Registers the proposer `suffix`."""

from collections.abc import Iterable
from dataclasses import dataclass

from lmkit.api import ProposerSpec, Tier, hookimpl


@dataclass(frozen=True, slots=True)
class Options:
    """Options of proposer.suffix."""

    longest: int = 8  # last tokens that are compared
    shortest: int = 3  # places that agree in fewer are no reason to guess
    remember: int = 16_384  # tokens of earlier texts that are kept; 0: guesses come from the row's own text alone

    def __post_init__(self) -> None:
        if not 2 <= self.shortest <= self.longest <= 64:
            raise ValueError(
                f"shortest is {self.shortest} and longest {self.longest}, needs 2 <= shortest <= longest <= 64"
            )
        if not 0 <= self.remember <= 1 << 20:
            raise ValueError(f"remember is {self.remember}, needs 0 <= remember <= {1 << 20}")


@hookimpl
def lmkit_proposers() -> Iterable[ProposerSpec]:
    yield ProposerSpec(
        name="suffix",
        summary="What most often followed the longest run of last tokens, in this text and in earlier ones",
        target="lmkit_proposer_suffix.proposer:Suffix",
        options="lmkit_proposer_suffix.hooks:Options",
        tier=Tier.OPTIMIZED,
    )

"""What a configuration field says about itself beside its type: limits, allowed words, and the name of its flag."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Between:
    """An integer from `low` to `high`, both included; None = unbounded."""

    low: int | None = None
    high: int | None = None

    def __str__(self) -> str:
        if self.high is None:
            return f"at least {self.low}"
        return f"from {self.low} to {self.high}" if self.low is not None else f"at most {self.high}"


@dataclass(frozen=True, slots=True)
class OneOf:
    """Exactly one of these words."""

    words: tuple[str, ...]

    def __str__(self) -> str:
        return ", ".join(self.words)


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """'auto', a size ('2GiB') or a share of what is free ('60%')."""

    def __str__(self) -> str:
        return "auto, a size such as 2GiB, or a share such as 60%"


@dataclass(frozen=True, slots=True)
class Several:
    """A text of several parts with commas between, whose flag may be given several times."""


@dataclass(frozen=True, slots=True)
class Flag:
    """Name on the command line, where the field's own name would be ambiguous there."""

    name: str

"""Registers the policy `fair`."""

from collections.abc import Iterable
from dataclasses import dataclass

from lmkit.api import SchedulerSpec, Tier, hookimpl


@dataclass(frozen=True, slots=True)
class Options:
    """Options of scheduler.fair."""

    output: float = 4.0  # what a token of an answer counts, in tokens of a prompt

    def __post_init__(self) -> None:
        if not 0 <= self.output <= 1000:
            raise ValueError(f"output is {self.output}, needs 0 <= output <= 1000")


@hookimpl
def lmkit_schedulers() -> Iterable[SchedulerSpec]:
    yield SchedulerSpec(
        name="fair",
        summary="tokens shared among API keys: who has had least goes first, by priority",
        target="lmkit_scheduler_fair.policy:Fair",
        options="lmkit_scheduler_fair.hooks:Options",
        tier=Tier.PORTABLE,
    )

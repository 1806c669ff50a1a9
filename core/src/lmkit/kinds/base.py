"""What a kind of plugin is, and the parts that all kinds are made of."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from lmkit.api.refusal import Refusal
from lmkit.api.specs import SelectRequest, Spec

Refusals = Iterator[Refusal]


def listed(names: Iterable[object]) -> str:
    """ "{a,b}", for the texts of refusals."""
    return "{" + ",".join(sorted(map(str, names))) + "}"


def none(spec: Spec, request: SelectRequest) -> Refusals:
    """No refusals: whatever is registered serves any request of its kind."""
    return iter(())


def no_claim(spec: Spec, request: SelectRequest) -> Claim | None:
    """Nothing in the request speaks for one candidate more than for another."""
    return None


@dataclass(frozen=True, slots=True)
class Claim:
    """What makes `auto` take a candidate. Claims of the lowest rank come first."""

    rank: int
    why: str
    length: int = 0  # of the glob that fits: a longer one knows the model better


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of plugin. Its hook, entry-point group, options, `explain` topic and page of reference follow from this.

    `doc` is the text of the hook, with an example that the tests install and run. A kind stands in the tuple
    `lmkit.kinds.KINDS`, and its public names in `lmkit.api`; nothing else in the core knows of it but its consumer.
    """

    name: str  # "attention": the group is "lmkit.attention", and options are attention.NAME.OPTION
    spec: type[Spec]  # what is registered
    hook: str  # the registration hook: () -> Iterable[spec]
    used_by: str  # the module that loads the target of what was chosen: a kind without a consumer is none
    doc: str | None
    interface: int = 1  # raised by changes that break plugins
    request: type[SelectRequest] = SelectRequest  # what is asked of a candidate
    refusals: Callable[[Any, Any], Refusals] = none  # stage 7: (spec, request)
    auto_refusals: Callable[[Any, Any], Refusals] = none  # stage 7 where the user named none
    claim: Callable[[Any, Any], Claim | None] = no_claim  # (spec, request): why `auto` prefers it

    @property
    def group(self) -> str:
        """The entry-point group."""
        return f"lmkit.{self.name}"

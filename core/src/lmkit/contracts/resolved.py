"""The answer of the resolver: chosen once in the parent process, printed, tested and sent to workers as JSON."""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec

from lmkit.contracts.checkpoint import Checkpoint
from lmkit.contracts.device import DeviceInfo
from lmkit.contracts.refusal import Refused


class Choice(msgspec.Struct, frozen=True):
    """One chosen implementation and what was refused on the way."""

    kind: str
    component: str
    name: str
    target: str  # Ref
    dist: str
    version: str
    module: str  # hooks module that registered it
    adapter: str = ""  # Ref: what makes of the target, which is of the interface before, one of today
    options: dict[str, Any] = {}
    why: str = ""  # "explicit", "auto", "only candidate", "checkpoint says quant_method=fp8"
    refused: tuple[Refused, ...] = ()


class Derived(msgspec.Struct, frozen=True):
    """A value that followed from a choice, with its provenance: "block_size=16 <- torch prefers 16 (user: auto)"."""

    key: str
    value: Any
    source: str


class Draft(msgspec.Struct, frozen=True):
    """The model that a proposer runs. Set by the resolver; read by whoever loads or counts it."""

    plan: ResolvedPlan  # of what is its own: the model, formats and kernels of its weights, its loader
    checkpoint: Checkpoint


class ResolvedPlan(msgspec.Struct, frozen=True):
    """Everything that can be chosen, chosen. Workers import only these targets, and verify dist versions."""

    device: DeviceInfo
    choices: tuple[Choice, ...]
    derived: tuple[Derived, ...] = ()
    warnings: tuple[str, ...] = ()  # for the first screen: slow choices, failed candidates, ignored options
    draft: Draft | None = None

    def choice(self, kind: str, component: str | None = None) -> Choice | None:
        """The choice of `kind` (and `component`), or None."""
        for c in self.choices:
            if c.kind == kind and (component is None or c.component == component):
                return c
        return None

    def all_choices(self) -> tuple[Choice, ...]:
        """The choices of the plan, and those for the draft that a proposer runs."""
        return self.choices if self.draft is None else (*self.choices, *self.draft.plan.choices)

    def value(self, key: str, default: Any = None) -> Any:
        return next((d.value for d in self.derived if d.key == key), default)

    def for_replica(self, replica: int) -> ResolvedPlan:
        """The plan of engine `replica` of `--dp`, which finds its number as the value "replica"."""
        if not replica:
            return self
        return msgspec.structs.replace(self, derived=(*self.derived, Derived("replica", replica, "--dp")))

    def to_json(self) -> bytes:
        return msgspec.json.encode(self, enc_hook=str)  # of paths

    @property
    def hash(self) -> str:
        """First 16 hex digits of SHA-256 over the JSON form."""
        return hashlib.sha256(self.to_json()).hexdigest()[:16]

"""One line of an entry-point group, as the host's table holds it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from lmkit.api import Refusal, Spec
from lmkit.plugins.catalog import catalog, folders

State = Literal["ok", "disabled", "incompatible", "broken", "ambiguous", "shadowed"]


@dataclass(slots=True, eq=False)
class Entry:
    """One line of an `lmkit.*` entry-point group, and what is known of it. Written by the host only."""

    kind: str
    name: str
    module: str  # "lmkit_attention_torch.hooks"
    dist: str
    version: str
    location: str  # directory of the dist's metadata
    core_range: str | None  # specifier of its requirement on the core; None when it states none
    state: State = "ok"
    reason: Refusal | None = None  # why the state is not ok
    stage: int = 0  # the selection stage at which `reason` was found
    loaded: bool = False
    spec: Spec | None = None
    seconds: float = 0.0  # spent importing and registering its module
    trace: str = ""  # traceback of a broken entry
    warnings: list[str] = field(default_factory=list)

    @property
    def key(self) -> str:
        return f"{self.kind}:{self.name}"

    @property
    def official(self) -> bool:
        """Whether it is lmkit's own: anybody can take the name of a dist, so the catalog must have the plugin too."""
        return self.dist in folders() and catalog().get(self.kind, {}).get(self.name) == self.dist

    @property
    def summary(self) -> str:
        return self.spec.summary if self.spec else ""

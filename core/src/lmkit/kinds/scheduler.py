"""Order policies (two key functions), or, rarely, whole schedulers.

Example, entry point `[project.entry-points."lmkit.scheduler"] shortest = "shortest.hooks"`::

    from lmkit.api import SchedulerSpec, Tier, hookimpl


    @hookimpl
    def lmkit_schedulers():
        yield SchedulerSpec(
            name="shortest", summary="Shortest prompt first", target="shortest.policy:Shortest",
            tier=Tier.PORTABLE,
        )
"""

from __future__ import annotations

from dataclasses import dataclass

from lmkit.contracts.specs import SelectRequest, Spec
from lmkit.kinds.base import Kind


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerSpec(Spec):
    """target: an OrderPolicy class, or a Scheduler class: one with `schedule`."""


KIND = Kind(
    "scheduler",
    spec=SchedulerSpec,
    hook="lmkit_schedulers",
    used_by="lmkit.engine.build",
    ask=lambda known: [SelectRequest(kind="scheduler")],
    setting="sched.policy",
    words="scheduler plugin: auto, fcfs, ...",
    doc=__doc__,
)

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
from typing import TYPE_CHECKING, Protocol

from lmkit.contracts.specs import SelectRequest, Spec
from lmkit.kinds.base import Kind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from lmkit.contracts.errors import ErrorInfo
    from lmkit.contracts.scheduling import Admitted
    from lmkit.contracts.wire import FinishReason, SchedStats, StepPlan, StepResult, TokenEvent


class RequestView(Protocol):
    """What a policy may read of a request (lmkit's own `Request` has these and more)."""

    @property
    def id(self) -> str: ...
    @property
    def priority(self) -> int:
        """Smaller is sooner."""

    @property
    def arrival(self) -> float:
        """Seconds, the front end's monotonic clock."""

    @property
    def tenant(self) -> str:
        """On whose account it is: those of a server with several keys; "" elsewhere."""

    @property
    def order(self) -> int:
        """Counts requests as they enter the engine."""

    @property
    def num_prompt_tokens(self) -> int: ...
    @property
    def num_output(self) -> int: ...
    @property
    def finish(self) -> FinishReason | None:
        """None until it has ended."""


class OrderPolicy(Protocol):
    """Who goes first. The usual scheduler plugin: two key functions, asked once when a request enters a queue.

    Running requests take blocks in the order of victim_key, from those with the largest. Among equal keys, the
    order of `add` decides. Optional: `gives_way(first, running)`, asked in a step where `first` of those that wait has
    no room, says which of `running` goes back to waiting, or None. Its admit_key, asked for anew, must be behind that
    of `first`. What it has drawn is kept; that it runs again in the end is for the policy to see to.

    Optional: `goes_first(waiting, running)`, asked in each step in which requests wait, says which of `waiting` is
    served now though others came before it, or None. Its admit_key is asked for anew, and half of the step's token
    budget is kept for it when prompts that are already running would take all of it.
    """

    def admit_key(self, r: RequestView) -> tuple:
        """Smallest is admitted first."""

    def victim_key(self, r: RequestView) -> tuple:
        """Largest is preempted first; must invert the admission order, so that the oldest always finishes."""


class Scheduler(Protocol):
    """Decides each step. A plugin's own one is constructed as target(limits: SchedLimits, kv: KVConfig, **options).

    Optional: `apart = True` in its class says that it keeps to `limits.apart`. Else it is refused where stages have
    several steps in flight.
    """

    def add(self, r: Admitted) -> None:
        """Raises RequestTooLarge when it cannot fit alone, EngineBusy when the queue is full."""

    def abort(self, ids: Iterable[str]) -> None:
        """Idempotent, legal at any moment. No event follows."""

    def schedule(self) -> StepPlan: ...
    def update(self, plan: StepPlan, result: StepResult) -> list[TokenEvent]: ...
    def fail_running(self, error: ErrorInfo) -> list[TokenEvent]:
        """After a lost step: end all running requests, forget all cached content. Workers have forgotten all rows."""

    def retry_running(self, plan: StepPlan, error: ErrorInfo) -> list[TokenEvent]:
        """After `plan` was lost: compute again what was running; only a row that fails alone ends, with `error`.

        Nothing that this step or a later one wrote may be found any more. Workers have forgotten all rows. Optional:
        without it `fail_running` is called.
        """

    def forget_cache(self, root: Callable[[Admitted], bytes] | None = None) -> None:
        """Nothing computed so far may be found any more. With `root` it is lost: what runs is computed again, named by
        the `root_hash` that it gives each request; workers have forgotten all rows. Optional: without it no weights
        are replaced, and the engine does not sleep.
        """

    def has_work(self) -> bool: ...
    def stats(self) -> SchedStats: ...
    def check(self) -> None:
        """All invariants; AssertionError naming the broken one."""


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

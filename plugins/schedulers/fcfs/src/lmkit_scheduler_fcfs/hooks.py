"""Registers the policy `fcfs`."""

from lmkit.api import SchedulerSpec, Tier, hookimpl


@hookimpl
def lmkit_schedulers():
    return [
        SchedulerSpec(
            name="fcfs",
            summary="first come, first served, by priority",
            target="lmkit_scheduler_fcfs.policy:FirstComeFirstServed",
            tier=Tier.OPTIMIZED,
            stability="stable",
        ),
        SchedulerSpec(
            name="priority",
            summary="as fcfs, and who is more urgent takes the row of who is less",
            target="lmkit_scheduler_fcfs.policy:Priority",
            tier=Tier.PORTABLE,
        ),
    ]

"""First come, first served, by priority."""

from __future__ import annotations

from lmkit.api import RequestView


class FirstComeFirstServed:
    """One order for both queues: the last to be admitted is the first to be preempted."""

    def admit_key(self, r: RequestView) -> tuple:
        return (r.priority, r.arrival, r.order)

    def victim_key(self, r: RequestView) -> tuple:
        return (r.priority, r.arrival, r.order)

"""First come, first served, by priority."""

from __future__ import annotations

from collections.abc import Sequence

from lmkit.api import RequestView


class FirstComeFirstServed:
    """One order for both queues: the last to be admitted is the first to be preempted."""

    def admit_key(self, r: RequestView) -> tuple:
        return (r.priority, r.arrival, r.order)

    def victim_key(self, r: RequestView) -> tuple:
        return (r.priority, r.arrival, r.order)


class Priority(FirstComeFirstServed):
    """The same order, kept at any moment: who is less urgent makes room at once."""

    def gives_way(self, first: RequestView, running: Sequence[RequestView]) -> RequestView | None:
        return running[-1] if running and running[-1].priority > first.priority else None

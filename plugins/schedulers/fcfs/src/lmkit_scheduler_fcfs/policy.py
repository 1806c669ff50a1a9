"""First come, first served, by priority."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lmkit.scheduling.request import Request


class FirstComeFirstServed:
    """One order for both queues: the last to be admitted is the first to be preempted."""

    def admit_key(self, r: Request) -> tuple:
        return (r.priority, r.arrival, r.order)

    def victim_key(self, r: Request) -> tuple:
        return (r.priority, r.arrival, r.order)

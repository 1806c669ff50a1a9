"""Conformance kit of schedulers and policies."""

from __future__ import annotations

from lmkit.scheduling.request import Request


class ArrivalOrder:
    """The policy that tests use: priority, then arrival."""

    def admit_key(self, r: Request) -> tuple:
        return (r.priority, r.arrival)

    def victim_key(self, r: Request) -> tuple:
        return (r.priority, r.arrival)

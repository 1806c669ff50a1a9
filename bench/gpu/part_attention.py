"""Conformance on the device: on_attention.py."""

from __future__ import annotations

from conformance import conform
from machine import Machine
from report import Report


def measure(machine: Machine, report: Report, seconds: float) -> None:
    conform("on_attention.py", machine, report)

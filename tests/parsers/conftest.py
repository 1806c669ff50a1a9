"""Prints what was counted: `count` adds to a line of the summary."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest


@pytest.fixture
def count(record_property: Callable[[str, object], None]) -> Callable[[str, int], None]:
    def add(what: str, number: int = 1) -> None:
        record_property(f"count {what}", number)

    return add


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Of the reports, which come from other processes too (pytest-xdist)."""
    counts: Counter[str] = Counter()
    for report in terminalreporter.getreports("passed"):
        for what, number in report.user_properties:
            if what.startswith("count "):
                counts[what.removeprefix("count ")] += int(str(number))
    for what, total in sorted(counts.items()):
        terminalreporter.write_line(f"parsers: {total:>9,} {what}")

"""Prints what was counted: `count` adds to a line of the summary."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest

COUNTS: Counter[str] = Counter()


@pytest.fixture
def count() -> Callable[[str, int], None]:
    def add(what: str, number: int = 1) -> None:
        COUNTS[what] += number

    return add


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for what, number in sorted(COUNTS.items()):
        terminalreporter.write_line(f"parsers: {number:>9,} {what}")

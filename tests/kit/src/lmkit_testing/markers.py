"""The marks that kits put on tests, for pytest to know: this is a plugin of pytest wherever the kit is installed."""

from __future__ import annotations

import pytest

MARKERS = (
    "slow: takes more than a few seconds; run by who asks for it, with: pytest -m slow",
    "one_in(n): a quick run of lmkit's own tests takes every n-th case, and all of a plugin that changed",
)


def pytest_configure(config: pytest.Config) -> None:
    for line in MARKERS:
        config.addinivalue_line("markers", line)

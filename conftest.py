"""What all tests share."""

from __future__ import annotations

import gc
import signal


def pytest_configure() -> None:
    """A shell's background jobs ignore SIGINT, and so would the programs that tests start and interrupt."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish() -> None:
    """What is there now stays until the end: collections of garbage need not look at it again (a second each, late)."""
    gc.freeze()

"""Times in tests: a bound holds on a busy machine too."""

from __future__ import annotations

from collections.abc import Callable


def least(measure: Callable[[], float], enough: float, tries: int = 6) -> float:
    """The least of up to `tries` measurements; the first one below `enough` is the last.

    Whatever else a machine does, a collection of garbage included, only ever adds to a time: one that fits is the
    truth, one that does not is measured again.
    """
    found = measure()
    for _ in range(tries - 1):
        if found < enough:
            break
        found = min(found, measure())
    return found

"""Arithmetic of benchmarks. Times are seconds."""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field


def percentile(values: Sequence[float], q: float) -> float:
    """The q-th percentile (0 to 100), linear between the two nearest ranks. Raises ValueError when there is nothing."""
    if not values:
        raise ValueError("no values")
    ordered = sorted(values)
    at = (len(ordered) - 1) * q / 100
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    if ordered[low] == ordered[high]:
        return ordered[low]
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


@dataclass(slots=True)
class Timing:
    """One request: when it was sent, when each stream event with output came, how many tokens they held.

    Times are those of one monotonic clock. `num_tokens` is what the server says, else the number of events.
    """

    sent: float
    events: list[float] = field(default_factory=list)
    num_prompt_tokens: int = 0
    num_tokens: int = 0
    error: str = ""

    @property
    def ok(self) -> bool:
        return not self.error and bool(self.events)

    @property
    def ttft(self) -> float:
        """From sending to the first token."""
        return self.events[0] - self.sent

    @property
    def e2e(self) -> float:
        """From sending to the last token."""
        return self.events[-1] - self.sent

    @property
    def tpot(self) -> float | None:
        """Mean time per token after the first; None when there is no second one."""
        return (self.e2e - self.ttft) / (self.num_tokens - 1) if self.num_tokens > 1 else None

    @property
    def itl(self) -> list[float]:
        """Gaps between stream events. An event may hold several tokens, so this is what a reader sees."""
        return [b - a for a, b in zip(self.events, self.events[1:], strict=False)]


@dataclass(frozen=True, slots=True)
class Slo:
    """What each request has to keep, in seconds; None = no limit."""

    ttft: float | None = None
    tpot: float | None = None
    e2e: float | None = None

    def kept_by(self, t: Timing) -> bool:
        """A failed request keeps nothing. A request without a second token has no TPOT to miss."""
        if not t.ok:
            return False
        pairs = ((self.ttft, t.ttft), (self.tpot, t.tpot), (self.e2e, t.e2e))
        return all(limit is None or value is None or value <= limit for limit, value in pairs)


def goodput(timings: Sequence[Timing], slo: Slo, seconds: float) -> float:
    """Requests per second that kept the whole SLO."""
    return sum(map(slo.kept_by, timings)) / seconds if seconds > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Ratio:
    """A ratio of medians and the interval in which it lies nine times out of ten."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.2f}x ({self.low:.2f} to {self.high:.2f})"


def paired_ratio(ours: Sequence[float], theirs: Sequence[float]) -> Ratio:
    """Median of the ratios of each round, with the smallest and largest as spread: rounds that ran side by side."""
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    return Ratio(statistics.median(ratios), min(ratios), max(ratios))


def bootstrap_ratio(a: Sequence[float], b: Sequence[float], samples: int = 1000) -> Ratio:
    """median(b) / median(a) of independent samples; the interval from resampling both (Efron 1979)."""
    numbers = random.Random(0)

    def median(values: Sequence[float]) -> float:
        return statistics.median(numbers.choices(values, k=len(values)))

    found = [rb / ra for ra, rb in ((median(a), median(b)) for _ in range(samples)) if ra]
    base = statistics.median(a)
    value = statistics.median(b) / base if base else float("nan")
    return Ratio(value, percentile(found, 5), percentile(found, 95)) if found else Ratio(value, value, value)

"""Two results, metric by metric: which got better, which got worse, and whether that is more than noise."""

from __future__ import annotations

from dataclasses import dataclass

from lmkit.api import ConfigError

from lmkit_bench.result import Metric, Result
from lmkit_bench.stats import Ratio, bootstrap_ratio


@dataclass(frozen=True, slots=True)
class Change:
    """One metric in both results. `ratio` is new / old."""

    name: str
    old: Metric
    new: Metric
    ratio: Ratio

    @property
    def gain(self) -> Ratio:
        """Above 1: better."""
        r = self.ratio
        if self.old.better != "lower":
            return r
        return Ratio(*(1 / value if value else float("inf") for value in (r.value, r.high, r.low)))

    def regressed(self, threshold: float) -> bool:
        """Worse by more than `threshold` (0.05: 5 %), and more than resampling alone explains."""
        return self.old.better != "neither" and self.gain.value < 1 - threshold and self.gain.high < 1


def compare(old: Result, new: Result) -> list[Change]:
    """Raises ConfigError when the two measured different things."""
    if old.kind != new.kind:
        raise ConfigError(f"one is a result of {old.kind!r}, the other of {new.kind!r}", fix="compare equal ones")
    names = [name for name in old.metrics if name in new.metrics]
    if not names:
        raise ConfigError("the two results have no metric in common", fix="measure both with the same options")
    changes = []
    for name in names:
        a, b = old.metrics[name], new.metrics[name]
        if a.unit != b.unit:
            raise ConfigError(f"{name}: one is in {a.unit}, the other in {b.unit}", fix="measure again")
        changes.append(Change(name, a, b, bootstrap_ratio(a.samples, b.samples)))
    return changes


def differences(old: Result, new: Result) -> list[str]:
    """What else differs: a ratio between two machines or two sets of options is no regression."""
    found = []
    if old.machine != new.machine:
        found.append(f"machines: {old.machine.processor} / {new.machine.processor}")
    keys = sorted({*old.flags, *new.flags})
    found += [
        f"{key}: {old.flags.get(key)!r} / {new.flags.get(key)!r}"
        for key in keys
        if old.flags.get(key) != new.flags.get(key)
    ]
    return found

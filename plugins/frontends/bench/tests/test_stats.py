"""Arithmetic of benchmarks, against definitions and against numpy."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from lmkit_bench.stats import Slo, Timing, bootstrap_ratio, goodput, paired_ratio, percentile

numbers = st.floats(0.001, 1e4)


@given(st.lists(numbers, min_size=1, max_size=50), st.floats(0, 100))
def test_percentile_is_that_of_numpy(values: list[float], q: float) -> None:
    assert percentile(values, q) == pytest.approx(float(np.percentile(values, q)), rel=1e-9)


@given(st.lists(numbers, min_size=1, max_size=50), st.floats(0, 100), st.floats(0, 100))
def test_percentiles_are_ordered_and_within_the_values(values: list[float], p: float, q: float) -> None:
    low, high = sorted((p, q))
    assert min(values) <= percentile(values, low) <= percentile(values, high) <= max(values)


def test_percentile_of_nothing() -> None:
    with pytest.raises(ValueError, match="no values"):
        percentile([], 50)


@st.composite
def timings(draw: st.DrawFn) -> Timing:
    sent = draw(st.floats(0, 10))
    gaps = draw(st.lists(st.floats(0.001, 5), max_size=8))
    events = list(np.cumsum([sent, *gaps])[1:]) if gaps else []
    failed = draw(st.booleans())
    return Timing(sent, events, num_tokens=len(events), error="it failed" if failed else "")


@given(timings())
def test_times_of_a_request_add_up(t: Timing) -> None:
    if not t.ok:
        return
    assert t.e2e == pytest.approx(t.ttft + sum(t.itl))
    if t.tpot is not None:
        assert t.e2e == pytest.approx(t.ttft + t.tpot * (t.num_tokens - 1))


def test_tpot_counts_tokens_and_itl_counts_events() -> None:
    """Two tokens per event: the reader sees half as many gaps as there are tokens."""
    t = Timing(1.0, [2.0, 3.0, 4.0], num_tokens=6)
    assert (t.ttft, t.e2e, t.itl) == (1.0, 3.0, [1.0, 1.0])
    assert t.tpot == pytest.approx(2.0 / 5)
    assert Timing(0.0, [1.0], num_tokens=1).tpot is None


@given(st.lists(timings(), max_size=12), numbers, numbers, st.floats(1, 3))
def test_a_looser_slo_never_lowers_goodput(all: list[Timing], ttft: float, e2e: float, looser: float) -> None:
    tight, loose = Slo(ttft=ttft, e2e=e2e), Slo(ttft=ttft * looser, e2e=e2e * looser)
    assert goodput(all, tight, 2.0) <= goodput(all, loose, 2.0) <= goodput(all, Slo(), 2.0)
    assert goodput(all, Slo(), 2.0) == sum(t.ok for t in all) / 2.0


def test_every_limit_of_an_slo_counts() -> None:
    t = Timing(0.0, [1.0, 1.5], num_tokens=2)
    assert Slo(1.0, 0.5, 1.5).kept_by(t)
    assert not Slo(ttft=0.9).kept_by(t)
    assert not Slo(tpot=0.4).kept_by(t)
    assert not Slo(e2e=1.4).kept_by(t)
    assert not Slo().kept_by(Timing(0.0, error="refused"))


def test_paired_ratio_forgives_a_slow_round() -> None:
    """The third round ran on a machine three times as slow: both felt it, the ratio did not."""
    ratio = paired_ratio([2.0, 2.2, 0.7], [1.0, 1.1, 0.35])
    assert (ratio.value, ratio.low, ratio.high) == (pytest.approx(2.0),) * 3


@given(st.lists(numbers, min_size=1, max_size=10), st.floats(0.1, 10))
def test_bootstrap_ratio_of_scaled_samples(values: list[float], factor: float) -> None:
    ratio = bootstrap_ratio(values, [v * factor for v in values], samples=50)
    assert ratio.value == pytest.approx(factor)
    assert ratio.low <= ratio.high

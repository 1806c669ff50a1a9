"""Result files: round trip, comparison, pictures; and kernels against limits."""

from __future__ import annotations

from pathlib import Path

import pytest
from lmkit.api import BenchmarkCase, ConfigError
from lmkit_bench.compare import compare, differences
from lmkit_bench.kernels import run_cases
from lmkit_bench.limits import Limits
from lmkit_bench.plot import plot
from lmkit_bench.result import Metric, Result, make_result, read, write
from lmkit_cli import run

LOW = [1.0, 1.1, 0.9, 1.0, 1.05]


def result(factor: float = 1.0, **flags: object) -> Result:
    metrics = {
        "ttft": Metric("s", "lower", [v * factor for v in LOW]),
        "output": Metric("tok/s", "higher", [v / factor for v in LOW]),
        "concurrency 1/e2e": Metric("s", "lower", LOW),
        "concurrency 4/e2e": Metric("s", "lower", LOW),
    }
    return make_result("serve", "a title", metrics, flags)


def test_round_trip(tmp_path: Path) -> None:
    first = result(seed=3)
    write(first, tmp_path / "deep" / "r.json")
    assert read(tmp_path / "deep" / "r.json") == first
    assert first.machine.cores >= 1
    assert "lmkit-core" in first.versions


@pytest.mark.parametrize("text", ["", "{}", '{"kind": 3}', "[]"])
def test_other_files_are_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(ConfigError, match="no result"):
        read(tmp_path / "x.json")


def test_slower_is_worse_whichever_way_the_metric_points() -> None:
    worse = {change.name for change in compare(result(), result(1.5)) if change.regressed(0.05)}
    assert worse == {"ttft", "output"}
    assert not any(change.regressed(0.05) for change in compare(result(), result(0.5)))
    assert not any(change.regressed(0.05) for change in compare(result(), result(1.02)))


def test_noise_is_no_regression() -> None:
    old, new = result(), result()
    old.metrics = {"x": Metric("s", "lower", [1.0, 2.0, 3.0])}
    new.metrics = {"x": Metric("s", "lower", [2.9, 2.2, 0.9])}
    (change,) = compare(old, new)
    assert change.gain.value < 0.95
    assert not change.regressed(0.05)


def test_what_cannot_be_compared() -> None:
    other = result()
    other.kind = "latency"
    with pytest.raises(ConfigError, match="latency"):
        compare(result(), other)
    assert differences(result(seed=1), result(seed=2)) == ["seed: 1 / 2"]


def test_compare_command_ends_with_1_on_a_regression(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, factor in (("a", 1.0), ("b", 1.5)):
        write(result(factor), tmp_path / f"{name}.json")
    a, b = str(tmp_path / "a.json"), str(tmp_path / "b.json")
    assert run(["bench", "compare", a, b]) == 1
    assert "2 of 4 metrics are worse" in capsys.readouterr().out
    assert run(["bench", "compare", a, a]) == 0
    assert run(["bench", "compare", a, b, "--threshold", "0.6"]) == 0


@pytest.mark.parametrize("suffix", [".png", ".svg"])
def test_plot(suffix: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="plots need matplotlib")
    path = tmp_path / f"both{suffix}"
    plot([result(), result(1.3)], ["before", "after"], path)
    start = path.read_bytes()[:200]
    assert b"PNG" in start if suffix == ".png" else b"<svg" in start or b"<?xml" in start
    with pytest.raises(ConfigError, match="no picture"):
        plot([result()], ["before"], tmp_path / "x.txt")


def test_share_of_the_limit_that_binds() -> None:
    """Reads 8 GB/s, multiplies 1 GFLOP/s: a case is held against what takes longer."""
    limits = Limits(read=8e9, flops={"float32": 1e9})

    def case(bytes: int, flops: int, dtype: str = "float32") -> BenchmarkCase:
        return BenchmarkCase(name="x", run=int, bytes=bytes, flops=flops, dtype=dtype)

    assert limits.share(case(8_000_000, 1000), 0.002) == pytest.approx(0.5)
    assert limits.share(case(8, 1_000_000), 0.002) == pytest.approx(0.5)
    assert limits.share(case(8_000_000, 10**9, "int8"), 0.001) == pytest.approx(1.0)
    assert Limits().share(case(1, 1), 1.0) is None


def test_cases_that_are_limits_are_learnt() -> None:
    limits = Limits()
    data = bytes(1 << 16)
    cases = [
        BenchmarkCase(name="read", run=lambda: data.count(1), bytes=len(data), limit="read"),
        BenchmarkCase(name="work", run=lambda: data.count(1), bytes=len(data)),
    ]
    limit, work = run_cases(iter(cases), limits)
    assert limits.read == pytest.approx(len(data) / min(limit.samples))
    share = limits.share(work.case, work.seconds)
    assert share is not None
    assert 0 < share < 2

"""`lmkit bench` on a tiny model, to its result files."""

from __future__ import annotations

from pathlib import Path

import lmkit_cli
import pytest
from lmkit_bench.result import Result, read

from .conftest import lmkit


def bench(tmp_path: Path, *args: str) -> Result:
    file = tmp_path / "result.json"
    done = lmkit("bench", *args, "-o", str(file))
    assert done.returncode == 0, done.stderr
    return read(file)


@pytest.mark.full
def test_latency(tiny: Path, tmp_path: Path) -> None:
    found = bench(tmp_path, "latency", str(tiny), "--batch", "3", "--output-tokens", "5", "--rounds", "2")
    m = found.metrics
    assert all(len(metric.samples) == 2 for metric in m.values())
    for ttft, step, e2e in zip(m["ttft"].samples, m["decode step"].samples, m["e2e"].samples, strict=True):
        assert ttft + 4 * step == pytest.approx(e2e)
    assert m["output"].samples[0] == pytest.approx(15 / m["e2e"].samples[0])
    assert found.flags["batch"] == 3
    assert found.flags["model.model"] == str(tiny)
    assert found.details["chosen"]["platform"] == "cpu"


@pytest.mark.full("lmkit-bench")
def test_throughput_of_a_file_of_texts(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "Hello there"}\n{"token_ids": [5, 6, 7], "max_tokens": 2}\n')
    found = bench(tmp_path, "throughput", str(tiny), "--dataset", str(tmp_path / "prompts.jsonl"), "-n", "4")
    seconds = found.metrics["seconds"].median
    assert found.metrics["output"].median == pytest.approx(6 / seconds)
    assert found.metrics["total"].median == pytest.approx((6 + 11 + 3) / seconds)


@pytest.mark.full("lmkit-bench")
def test_phases_of_a_start_sum_to_the_wall_time(tiny: Path, tmp_path: Path) -> None:
    m = bench(tmp_path, "startup", str(tiny), "--rounds", "1").metrics
    for name in (
        "python",
        "plugins",
        "resolve",
        "import",
        "load weights",
        "pack weights",
        "KV cache",
        "http server",
        "first token",
    ):
        assert m[name].median > 0, name
    assert m["sum of the phases"].median == pytest.approx(m["wall time"].median, rel=0.05)
    assert m["resident"].median > 50 << 20


@pytest.mark.full("lmkit-bench")
def test_serve_starts_a_server_with_the_same_options(tiny: Path, tmp_path: Path) -> None:
    found = bench(
        tmp_path, "serve", str(tiny), "--max-length", "200", "--no-prefix-cache", "--concurrency", "1,3", "--rate",
        "20", "--num-prompts", "4", "--input", "20", "--output-tokens", "6", "--slo", "ttft:60000",
    )  # fmt: skip
    m = found.metrics
    for load in ("concurrency 1", "concurrency 3", "rate 20"):
        assert m[f"{load}/errors"].samples == [0.0]
        assert len(m[f"{load}/e2e"].samples) == 4
        assert m[f"{load}/goodput"].median == m[f"{load}/requests"].median
    assert found.flags["model.max_length"] == 200
    assert found.details["ready after"] > 0


@pytest.mark.full("lmkit-bench")
def test_kernels(tiny: Path, tmp_path: Path) -> None:
    found = bench(tmp_path, "kernels", str(tiny), "--only", "linear_reference*16x*")
    names = [name for name in found.metrics if not name.startswith(("read", "multiply"))]
    assert names
    assert all(name.startswith("linear_reference plain 16x") for name in names)
    assert all(found.details["shares"][name] > 0 for name in names)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("serve", "--url", "nowhere"), "no address"),
        (("serve", "--concurrency", "0"), "--concurrency"),
        (("serve", "--slo", "speed:3"), "speed"),
        (("compare", "a.json", "b.json"), "cannot read a.json"),
        (("make-checkpoint", "qwen", "x"), "qwen2-0.5b"),
    ],
)
def test_wrong_use_ends_with_one_screen(args: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert lmkit_cli.run(("bench", *args)) == 2
    shown = capsys.readouterr().err
    assert words in shown
    assert "Traceback" not in shown

"""Results as pictures. Needs matplotlib, an extra of lmkit-bench: plot."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lmkit.api import ConfigError
from lmkit.plugins.catalog import install

from lmkit_bench.result import Result
from lmkit_bench.stats import percentile

LABEL = re.compile(r"^(?P<load>concurrency|rate) (?P<at>[\d.]+)/(?P<name>.+)$")
COLUMNS = 2
SUFFIXES = (".png", ".svg", ".pdf")


def plot(results: Sequence[Result], names: Sequence[str], path: Path) -> None:
    """One panel per metric; over concurrency or rate where there are several, else bars with their spread.

    `names` label the results. Raises ConfigError when matplotlib is missing or the suffix is not a picture's.
    """
    if path.suffix not in SUFFIXES:
        raise ConfigError(f"{path} is no picture", fix=f"let it end in {', '.join(SUFFIXES)}")
    figure_class = _matplotlib()
    panels = _panels(results)
    rows = math.ceil(len(panels) / COLUMNS)
    figure = figure_class(figsize=(6 * COLUMNS, 3.2 * rows), layout="constrained")
    for number, name in enumerate(panels, 1):
        axes = figure.add_subplot(rows, COLUMNS, number)
        series = [_series(result, name) for result in results]
        axes.set_title(name)
        if any(len(points) > 1 for points in series):
            _lines(axes, series, names)
        else:
            _bars(axes, series, names)
        axes.set_ylabel(next(m.unit for r in results for k, m in r.metrics.items() if _name(k) == name))
        axes.grid(axis="y", alpha=0.3)
    machine = results[0].machine
    figure.suptitle(f"{results[0].title}\n{machine.processor}, {machine.cores} cores, {results[0].created[:10]}")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def pareto(results: Sequence[Result], names: Sequence[str], path: Path) -> None:
    """Tokens per second of all users together over those of one, a point for each load; the line joins the points that
    no other one beats in both.

    Raises ConfigError for results without loads, and as `plot` does.
    """
    if path.suffix not in SUFFIXES:
        raise ConfigError(f"{path} is no picture", fix=f"let it end in {', '.join(SUFFIXES)}")
    figure = _matplotlib()(figsize=(7, 5), layout="constrained")
    axes = figure.add_subplot()
    for result, name in zip(results, names, strict=True):
        points = tradeoff(result)
        if not points:
            raise ConfigError(f"{name} has no loads with an output and a TPOT", fix="measure with lmkit bench serve")
        best = front([(x, y) for x, y, _ in points])
        (line,) = axes.plot(*zip(*best, strict=True), marker="o", label=name)
        axes.scatter(*zip(*[(x, y) for x, y, _ in points], strict=True), color=line.get_color(), alpha=0.4)
        for x, y, load in points:
            axes.annotate(load, (x, y), fontsize=7, xytext=(4, 4), textcoords="offset points")
    axes.set(xlabel="tokens per second of one user (1 / median TPOT)", ylabel="output tokens per second")
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def tradeoff(result: Result) -> list[tuple[float, float, str]]:
    """(tokens per second of one user, of all together, the load) of each load."""
    found = []
    for key, metric in result.metrics.items():
        load, _, name = key.rpartition("/")
        output = result.metrics.get(f"{load}/output")
        if name == "tpot" and output is not None and metric.median > 0:
            found.append((1 / metric.median, output.median, load))
    return found


def front(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The points that no other one beats in both coordinates, by the first."""
    kept: list[tuple[float, float]] = []
    for x, y in sorted(set(points), reverse=True):
        if not kept or y > kept[-1][1]:
            kept.append((x, y))
    return kept[::-1]


def _matplotlib() -> Any:
    try:
        from matplotlib.backends import backend_agg  # noqa: F401  drawing without a screen
        from matplotlib.figure import Figure
    except ImportError as e:
        raise ConfigError(f"plots need matplotlib ({e})", fix=install("lmkit-bench", "plot")) from e
    return Figure


def _name(key: str) -> str:
    found = LABEL.match(key)
    return found["name"] if found else key


def _panels(results: Sequence[Result]) -> list[str]:
    """Metrics of all results, each once, in order. `errors` only where there are some."""
    keys = dict.fromkeys(
        _name(key) for r in results for key, m in r.metrics.items() if any(m.samples) or _name(key) != "errors"
    )
    return list(keys)


Point = tuple[float, float, float, float]  # load, median, 10th and 90th percentile


def _series(result: Result, name: str) -> list[Point]:
    points = []
    for key, metric in result.metrics.items():
        if _name(key) == name:
            found = LABEL.match(key)
            at = float(found["at"]) if found else 0.0
            points.append((at, metric.median, percentile(metric.samples, 10), percentile(metric.samples, 90)))
    return sorted(points)


def _lines(axes: Any, series: Sequence[list[Point]], names: Sequence[str]) -> None:
    for points, label in zip(series, names, strict=True):
        if points:
            at, middle, low, high = zip(*points, strict=True)
            (line,) = axes.plot(at, middle, marker="o", label=label)
            axes.fill_between(at, low, high, alpha=0.15, color=line.get_color())
    axes.set_xlabel("load")
    axes.set_ylim(bottom=0)
    axes.legend()


def _bars(axes: Any, series: Sequence[list[Point]], names: Sequence[str]) -> None:
    for at, points in enumerate(series):
        for _, middle, low, high in points:
            axes.bar(at, middle, yerr=[[middle - min(low, middle)], [max(high, middle) - middle]], capsize=4)
    axes.set_xticks(range(len(names)), names)

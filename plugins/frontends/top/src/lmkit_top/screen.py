"""The figures as a screen of a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from lmkit_top.figures import Snapshot, quantile, rate, share

BARS = " ▁▂▃▄▅▆▇█"
WIDTH = 44  # looks in a line of bars: as wide as a terminal of 80 columns lets it be


def bars(values: Sequence[float | None], top: float | None = None) -> str:
    """A bar for each value, the last WIDTH of them; the highest is full, or `top` is."""
    shown = list(values)[-WIDTH:]
    highest = top or max((value for value in shown if value is not None), default=0.0)
    if not highest:
        return (BARS[0] * len(shown)).rjust(WIDTH)
    steps = len(BARS) - 1
    # what is more than nothing is seen
    marks = [BARS[0] if not v else BARS[max(1, min(steps, round(v / highest * steps)))] for v in shown]
    return "".join(marks).rjust(WIDTH)


def number(value: float | None, unit: str = "") -> str:
    """Three digits, or a dash."""
    if value is None:
        return "-"
    text = f"{value:,.0f}" if abs(value) >= 100 or value == int(value) else f"{value:.3g}"
    return f"{text}{unit}"


def seconds(value: float | None) -> str:
    return "-" if value is None else number(value * 1000, " ms") if value < 1 else number(value, " s")


def percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def screen(url: str, seen: Iterable[Snapshot], error: str = "") -> RenderableType:
    """All looks so far, the last one in figures. `error`: why there is no newer one."""
    looks, title = list(seen), Text(url, style="bold")
    if looks and looks[-1].model:
        title.append(f"  {looks[-1].model}", style="cyan")
    if error:
        title.append(f"  {error}", style="red")
    elif looks and not looks[-1].values.get("up", 1.0):
        title.append("  the engine is down", style="red")
    if not looks:
        return Panel(title)
    pairs = list(pairwise(looks))
    # one look has nothing to be compared with: what is counted since the start stands for it
    before, after = pairs[-1] if pairs else (looks[-1], looks[-1])
    return Panel(Group(title, _lines(looks, pairs), Text(), _latencies(looks, before, after), _counted(before, after)))


def _lines(looks: Sequence[Snapshot], pairs: Sequence[tuple[Snapshot, Snapshot]]) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(style="dim", min_width=18)
    table.add_column(justify="right", min_width=9)
    table.add_column(style="green")
    for label, name in (("requests running", "running"), ("requests waiting", "waiting")):
        values = [look.values.get(name) for look in looks]
        table.add_row(label, number(values[-1]), bars(values))
    usage = [look.values.get("kv") for look in looks]
    table.add_row("KV cache", percent(usage[-1]), bars(usage, 1.0))
    for label, name in (("output tokens/s", "output"), ("prompt tokens/s", "prompt"), ("steps/s", "steps")):
        rates = [rate(name, *pair) for pair in pairs]
        table.add_row(label, number(rates[-1] if rates else None), bars(rates))
    return table


def _latencies(looks: Sequence[Snapshot], before: Snapshot, after: Snapshot) -> Table:
    """They are those of all looks in sight."""
    first = looks[-WIDTH:][0]
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("", style="dim", min_width=18)
    for q in ("p50", "p90", "p99"):
        table.add_column(q, justify="right", min_width=9)
    for label, name in (("first token", "first"), ("between tokens", "next")):
        table.add_row(label, *(seconds(quantile(name, q, first, after)) for q in (0.5, 0.9, 0.99)))
    return table


def _counted(before: Snapshot, after: Snapshot) -> Text:
    parts = [
        ("prefix cache hits", percent(share("hits", "queries", before, after))),
        ("guesses right", percent(share("accepted", "drafts", before, after))),
        ("preempted/s", number(rate("preempted", before, after))),
        ("finished", number(after.values.get("finished"))),
    ]
    return Text("   ".join(f"{label} {value}" for label, value in parts), style="dim")

"""An explanation as text for a terminal."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table

from lmkit_cli import screen
from lmkit_cli.story import CandidateReport, Explanation, TopicReport

STYLE = {"selected": "bold green", "usable": "cyan", "refused": "red"}


def render(explanation: Explanation, console: Console) -> None:
    """Print an explanation: per selection the request, then each candidate with its verdict and reasons."""
    for report in explanation.topics:
        _render_topic(report, console)
    if explanation.derived:
        console.print("[bold]values[/]")
        table = Table.grid(padding=(0, 2))
        for d in explanation.derived:
            table.add_row(d.key, escape(str(d.value)), f"[dim]<- {escape(d.source)}[/]")
        console.print(Padding(table, (0, 0, 1, 2)))
    if explanation.memory is not None:
        console.print("[bold]memory[/]")
        console.print(Padding(screen.budget(explanation.memory), (0, 0, 1, 2)))
    for warning in explanation.warnings:
        console.print(f"[yellow]warning[/] {escape(warning)}", soft_wrap=True)


def _render_topic(report: TopicReport, console: Console) -> None:
    facts = "  ".join(f"{key}={_value(value)}" for key, value in report.request.items())
    title = f"{report.kind} {report.component}".strip()
    wanted = f"  asked for: {', '.join(report.wanted)}" if report.wanted and report.kind != "model" else ""
    console.print(f"[bold]{escape(title)}[/]  [dim]{escape(facts + wanted)}[/]", soft_wrap=True)
    rows = list(report.candidates)
    if rows or report.not_installed:
        _render_rows(report, rows, console)
    if report.instead:
        console.print(f"  {escape(report.instead)}", soft_wrap=True)
    if report.error is not None:
        prefix = f"not decided, because of {report.after}: " if report.after else ""
        console.print(f"  [red]{escape(prefix + report.error.message)}[/]", soft_wrap=True)
        if report.error.fix:
            console.print(f"    -> {escape(report.error.fix)}", soft_wrap=True)
    if not rows and not report.not_installed and report.error is None and not report.instead:
        console.print("  none installed")
    console.print()


def _render_rows(report: TopicReport, rows: Iterable[CandidateReport], console: Console) -> None:
    names = [c.name for c in rows] + list(report.not_installed)
    width = max(map(len, names)) + 2
    for c in rows:
        tier = f" ({c.tier})" if c.verdict != "refused" and c.tier else ""
        source = f"{c.version} ({c.dist})" if c.dist else ""
        console.print(
            f"  [bold]{escape(c.name):<{width}}[/]{source:<42} [{STYLE[c.verdict]}]{c.verdict.upper()}{tier}[/]",
            soft_wrap=True,
        )
        for r in c.reasons:
            fix = f"  -> {r.fix}" if r.fix else ""
            console.print(f"      {escape(f'{r.code:<20} needs {r.needed}, has {r.offered}{fix}')}", soft_wrap=True)
    for name, command in report.not_installed.items():
        console.print(f"  {escape(name):<{width}}{'not installed':<42} [dim]{escape(command)}[/]", soft_wrap=True)


def _value(value: object) -> str:
    return "{" + ",".join(map(str, value)) + "}" if isinstance(value, list) else str(value)

"""`lmkit show-config`: every value and who set it."""

from __future__ import annotations

import json
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from lmkit_cli.options import plugin_host, with_config
from lmkit_cli.settings import Setting, Sourced


@with_config
def command(
    settings: Sourced,
    resolved: Annotated[
        bool, typer.Option("--resolved/--no-resolved", help="also what follows from the model and the plugins")
    ] = True,
    as_json: Annotated[bool, typer.Option("--json", help="the same as data")] = False,
) -> None:
    """Show every configuration value and who set it: default, file, environment, command line or a plugin."""
    rows = settings.settings()
    if resolved:
        rows += _derived(settings)
    if as_json:
        print(json.dumps([{"key": r.key, "value": r.value, "source": r.source} for r in rows], indent=2))
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("value", "", "set by"):
        table.add_column(name, overflow="fold")
    for row in rows:
        style = "dim" if row.source == "default" else ""
        table.add_row(row.key, "-" if row.value is None else str(row.value), row.source, style=style)
    Console(highlight=False).print(table)


command.examples = """[bold]Examples[/]

lmkit show-config --config lmkit.toml --attention torch

LMKIT_CACHE__MEMORY=2GiB lmkit show-config --json
"""


def _derived(settings: Sourced) -> list[Setting]:
    """What the resolver adds: values that were "auto", and who decided."""
    from lmkit.plugins.resolve import resolve

    plan, _, _ = resolve(settings.config, plugin_host(settings))
    rows = [Setting(f"resolved.{d.key}", d.value, d.source) for d in plan.derived]
    for choice in plan.choices:
        key = ".".join(filter(None, ("resolved", choice.kind, choice.component)))
        rows.append(Setting(key, choice.name, f"{choice.why or 'auto'} ({choice.dist} {choice.version})"))
    return rows

"""`lmkit explain`: why each implementation is chosen or refused, without a device and without torch."""

from __future__ import annotations

import sys
from typing import Annotated

import msgspec
import typer
from rich.console import Console

from lmkit_cli.explanation import render
from lmkit_cli.options import plugin_host, with_config
from lmkit_cli.settings import Sourced
from lmkit_cli.story import TOPICS, explain


@with_config(model_argument=False)
def command(
    settings: Sourced,
    topic: Annotated[
        str | None, typer.Argument(help=f"one of: {', '.join(TOPICS)}; all of them when left out", show_default=False)
    ] = None,
    why: Annotated[str | None, typer.Option("--why", help="only this candidate, and the one selected")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="the same as data, with stable codes")] = False,
) -> None:
    """Show what would be chosen for a model, and why everything else would not."""
    explanation = explain(settings.config, plugin_host(settings), topic=topic, why=why)
    if as_json:
        sys.stdout.buffer.write(msgspec.json.format(msgspec.json.encode(explanation), indent=2) + b"\n")
    else:
        render(explanation, Console(highlight=False))

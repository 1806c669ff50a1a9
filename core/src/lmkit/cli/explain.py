"""`lmkit explain`: why each implementation is chosen or refused, without a device and without torch."""

from __future__ import annotations

import sys
from typing import Annotated

import msgspec
import typer
from rich.console import Console

from lmkit.config import gather
from lmkit.plugins.explain import TOPICS, explain, render
from lmkit.plugins.host import PluginHost


def command(
    topic: Annotated[
        str | None, typer.Argument(help=f"one of: {', '.join(TOPICS)}; all of them when left out", show_default=False)
    ] = None,
    model: Annotated[str | None, typer.Option("--model", help="the checkpoint to explain for")] = None,
    why: Annotated[str | None, typer.Option("--why", help="only this candidate, and the one selected")] = None,
    device: Annotated[
        str | None, typer.Option("--device", help="a described device instead of this machine's: NAME:9.0:80GB")
    ] = None,
    platform: Annotated[str | None, typer.Option("--platform", help="as for serve")] = None,
    attention: Annotated[str | None, typer.Option("--attention", help="as for serve")] = None,
    quantization: Annotated[str | None, typer.Option("--quantization", help="as for serve")] = None,
    dtype: Annotated[str | None, typer.Option("--dtype", help="as for serve")] = None,
    kv_dtype: Annotated[str | None, typer.Option("--kv-dtype", help="as for serve")] = None,
    offline: Annotated[bool, typer.Option("--offline", help="never touch the network")] = False,
    config: Annotated[str | None, typer.Option("--config", help="configuration file, TOML or YAML")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="the same as data, with stable codes")] = False,
) -> None:
    """Show what would be chosen, and why everything else would not."""
    given = {
        "model.model": model,
        "model.dtype": dtype,
        "model.quantization": quantization,
        "model.offline": offline or None,
        "cache.dtype": kv_dtype,
        "device": device,
        "platform": platform,
        "attention": attention,
    }
    settings = gather({key: value for key, value in given.items() if value is not None}, config)
    explanation = explain(settings.config, PluginHost(), topic=topic, why=why)
    if as_json:
        sys.stdout.buffer.write(msgspec.json.format(msgspec.json.encode(explanation), indent=2) + b"\n")
    else:
        render(explanation, Console(highlight=False))

"""`lmkit plan`: what a model needs and what fits, before anything is loaded."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import msgspec
import typer
from rich.console import Console

from lmkit_cli import screen
from lmkit_cli.options import plugin_host, with_config
from lmkit_cli.readiness import unready
from lmkit_cli.settings import Sourced


@with_config
def command(
    settings: Sourced,
    as_json: Annotated[bool, typer.Option("--json", help="the same as data; sizes in bytes")] = False,
) -> None:
    """Show the memory budget of a model (weights, activations, KV cache) and the context it buys. Loads nothing."""
    from lmkit.api import ConfigError
    from lmkit.plugins.resolve import resolve

    resolved, checkpoint, info = resolve(settings.config, plugin_host(settings))
    if resolved.device.described and not resolved.device.total_memory:
        text = settings.config.device
        raise ConfigError(f"device {text!r}: it is not said how much memory it has", fix=f"--device {text}:80GB")
    estimate, errors = unready(settings.config, resolved, checkpoint, info)
    for error in errors.values():
        raise error
    assert estimate is not None
    if as_json:
        data = {
            "model": checkpoint.ref,
            "device": msgspec.to_builtins(resolved.device),
            **asdict(estimate),
            "total_bytes": estimate.total_bytes,
        }
        print(msgspec.json.format(msgspec.json.encode(data), indent=2).decode())
        return
    console = Console(highlight=False)
    console.print(screen.choices(resolved, checkpoint, info))
    console.print()
    console.print(screen.budget(estimate))


command.examples = """[bold]Examples[/]

lmkit plan Qwen/Qwen2.5-0.5B-Instruct

lmkit plan ./my-model --kv-memory 2GiB --max-length 8192

lmkit plan ./my-model --device cuda:9.0:80GB      for a machine you do not have
"""

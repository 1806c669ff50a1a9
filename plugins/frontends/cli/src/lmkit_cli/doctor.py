"""`lmkit doctor`: does this installation work, and if not, what to do."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from importlib import metadata
from typing import Annotated

import typer
from lmkit import __version__
from lmkit.api import LmkitError
from lmkit.config import EngineConfig, format_size, read_environment
from lmkit.plugins.catalog import install
from rich.console import Console
from rich.table import Table

from lmkit_cli.findings import Finding, Level

PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "huggingface_hub", "fastapi", "uvicorn", "uvloop")
STYLES = {"ok": "green", "warn": "yellow", "fail": "bold red"}


def command(
    as_json: Annotated[bool, typer.Option("--json", help="the same as data")] = False,
    security: Annotated[
        bool, typer.Option("--security", help="what is open instead: addresses, keys, files, plugins that answer")
    ] = False,
) -> None:
    """Check this installation: versions, environment, devices, memory, plugins. Exit status 1 when something fails."""
    if security:
        from lmkit_cli import exposure

        findings = list(exposure.examine())
    else:
        findings = list(examine())
    if as_json:
        print(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
        for finding in findings:
            style = STYLES[finding.level]
            text = f"{finding.text}\n[dim]{finding.fix}[/]" if finding.fix and finding.level != "ok" else finding.text
            table.add_row(f"[{style}]{finding.level}[/]", finding.area, text)
        Console(highlight=False).print(table)
    if any(finding.level == "fail" for finding in findings):
        raise typer.Exit(1)


def examine() -> Iterator[Finding]:
    """All checks, in order. A check that breaks is a finding, not a crash."""
    yield Finding("lmkit", "ok", f"lmkit {__version__}, Python {platform.python_version()}, {platform.platform()}")
    for check in (_packages, _environment, _disk, _plugins):
        try:
            yield from check()
        except LmkitError as error:
            yield Finding(check.__name__.strip("_"), "fail", str(error), error.fix)
        except Exception as error:
            yield Finding(check.__name__.strip("_"), "fail", f"{type(error).__name__}: {error}")


def _packages() -> Iterator[Finding]:
    for name in PACKAGES:
        try:
            yield Finding("package", "ok", f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            serving = name in ("fastapi", "uvicorn", "uvloop")
            fix = install("lmkit-http" if serving else "lmkit-core")
            yield Finding("package", "warn" if serving else "fail", f"{name} is not installed", fix)


def _environment() -> Iterator[Finding]:
    environment = read_environment()
    named = [*environment.switches, *environment.names.values()]
    yield Finding("environment", "ok", ", ".join(named) if named else "no LMKIT_ variable is set")
    if sys.platform not in ("linux", "darwin"):
        yield Finding("environment", "warn", f"{sys.platform} is not tested", "use Linux or macOS")


def _disk() -> Iterator[Finding]:
    free = shutil.disk_usage(".").free
    level: Level = "ok" if free > 1 << 30 else "warn"
    yield Finding("disk", level, f"{format_size(free)} free here", "free some space for checkpoints")


def _plugins() -> Iterator[Finding]:
    from lmkit.plugins.host import PluginHost

    from lmkit_cli.health import ENDINGS, examine

    levels: dict[str, Level] = {"error": "fail", "warning": "warn", "info": "ok"}
    host = PluginHost()
    hopeless = []
    yield Finding("plugins", "ok", f"{len(host.entries())} installed")
    for found in examine(host):
        text = f"{found.subject} {found.code}: {found.message}"
        yield Finding("plugins", levels[found.level], text, found.fix)
        if found.code in ENDINGS:
            hopeless.append(found.subject)
    yield from _apart(hopeless)


def _apart(hopeless: list[str]) -> Iterator[Finding]:
    """`_demo` in a process of its own, without plugins that would end it."""
    environment = dict(os.environ)
    disabled = [environment.get("LMKIT_PLUGINS_DISABLE", ""), *hopeless]
    environment["LMKIT_PLUGINS_DISABLE"] = ",".join(filter(None, disabled))
    done = subprocess.run([sys.executable, "-m", "lmkit_cli.doctor"], capture_output=True, text=True, env=environment)
    if done.returncode:
        text = f"making a plan for the default model ended with status {done.returncode}"
        fix = "LMKIT_TRACE_PLUGINS=1 lmkit plan demo names what was called last"
        yield Finding("plan", "fail", text, fix)
        return
    yield from (Finding(**found) for found in json.loads(done.stdout.rpartition("\n\n")[2]))


def _demo() -> Iterator[Finding]:
    """The whole way to a plan for the default model, on this machine."""
    try:
        yield from _plan()
    except LmkitError as error:
        yield Finding("plan", "fail", str(error), error.fix)
    except Exception as error:
        yield Finding("plan", "fail", f"{type(error).__name__}: {error}")


def _plan() -> Iterator[Finding]:
    from lmkit.plugins.resolve import resolve

    resolved, checkpoint, _ = resolve(EngineConfig())
    device = resolved.device
    memory = f", {format_size(device.free_memory)} free of {format_size(device.total_memory)}"
    yield Finding("device", "ok", f"{device.platform}: {device.name}, {device.num_cores} cores{memory}")
    chosen = ", ".join(f"{c.kind} {c.name}" for c in resolved.choices if c.kind != "op")
    yield Finding("model", "ok", f"{checkpoint.ref}: {chosen}")


if __name__ == "__main__":  # what plugins print comes before the empty line
    print("\n\n" + json.dumps([asdict(finding) for finding in _demo()]))

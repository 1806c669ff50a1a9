"""`lmkit collect-env`: what a report of a fault needs to say of the installation. Names of variables, no values."""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import typer
from lmkit import __version__
from lmkit.config import read_environment

SHOWN = frozenset({
    "torch", "triton", "numpy", "transformers", "tokenizers", "safetensors", "huggingface-hub", "pydantic", "msgspec",
    "fastapi", "starlette", "uvicorn", "uvloop", "httptools", "flashinfer-python", "flash-attn", "llguidance",
    "xgrammar",
})  # fmt: skip
_RATHER = ("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "LD_PRELOAD")


def command(as_json: Annotated[bool, typer.Option("--json", help="the same as data")] = False) -> None:
    """Print what a report of a fault needs: versions, system, devices, plugins. Nothing in it is secret.

    Values of LMKIT_ variables are left out, keys may be among them.
    """
    found = dict(collect())
    if as_json:
        print(json.dumps(found, indent=2))
        return
    for name, value in found.items():
        if isinstance(value, dict):
            value = "".join(f"\n  {key} {text}" for key, text in value.items())
        print(f"{name}: {value or 'none'}")


def collect() -> Iterator[tuple[str, Any]]:
    """What is known, in order: texts, or texts by name. What breaks says so in its place."""
    yield "lmkit", __version__
    yield "python", f"{platform.python_version()} ({platform.python_implementation()}, {sys.platform})"
    yield "system", f"{platform.platform()}, {_system()}"
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    yield "processor", f"{platform.processor() or platform.machine()}, {cores} cores"
    yield "devices", _devices()
    yield "packages", dict(sorted(_packages()))
    environment = read_environment()
    yield "variables set", ", ".join(sorted([*environment.switches, *environment.names.values()]))
    yield "threads and devices asked for", {name: os.environ[name] for name in _RATHER if name in os.environ}
    yield "plugins", _plugins()


def _system() -> str:
    try:
        return platform.freedesktop_os_release().get("PRETTY_NAME", "unknown")
    except OSError:
        return "unknown"


def _packages() -> Iterator[tuple[str, str]]:
    """Those that matter, each with its version, and whether it is installed from its sources."""
    for dist in metadata.distributions():
        name = dist.name
        if name.startswith("lmkit-") or name in SHOWN:
            editable = '"editable": true' in (dist.read_text("direct_url.json") or "")
            yield name, dist.version + (" (editable)" if editable else "")


def _devices() -> dict[str, str]:
    """What the platforms of this installation say of the machine."""
    from lmkit.config import EngineConfig
    from lmkit.plugins.resolve import resolve

    found: dict[str, str] = {}
    try:
        device = resolve(EngineConfig())[0].device
        found[device.platform] = f"{device.name}, {device.num_cores} cores, {device.total_memory >> 20} MiB"
    except Exception as error:  # whatever is wrong here is what is to be reported
        found["none"] = f"{type(error).__name__}: {error}"
    for driver in (Path("/proc/driver/nvidia/version"), Path("/sys/module/amdgpu/version")):
        if driver.is_file():
            found[str(driver)] = driver.read_text(errors="replace").splitlines()[0][:200]
    return found


def _plugins() -> dict[str, str]:
    """Each with its dist; those that are not as they should be with the reason."""
    from lmkit.plugins.host import PluginHost

    found = {}
    for entry in PluginHost().entries():
        reason = f", {entry.state}" if entry.state != "ok" else ""
        found[entry.key] = f"{entry.dist} {entry.version}{reason}"
    return found

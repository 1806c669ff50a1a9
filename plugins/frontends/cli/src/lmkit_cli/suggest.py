"""`lmkit plugins suggest`: which dists run a checkpoint on this machine, and the line that installs what is missing."""

from __future__ import annotations

from collections.abc import Iterator
from fnmatch import fnmatchcase
from functools import cache
from importlib import metadata, resources
from pathlib import Path

import msgspec
from lmkit.api import Checkpoint
from lmkit.plugins.catalog import catalog, folders, install

# What an engine and its server need whatever they run: kind and name, as `auto` would take them.
ALWAYS = (
    ("executor", "uniproc"), ("scheduler", "fcfs"), ("op", "linear_reference"), ("renderer", "jinja"),
    ("structured_output", "masks"), ("grammar", "llguidance"), ("dialect", "openai"),
)  # fmt: skip
FALLBACK = "lmkit-model-transformers"
DRIVERS = {"cuda": ("/proc/driver/nvidia/version", "/dev/dxg"), "rocm": ("/dev/kfd",)}  # files of a driver


class Suggestion(msgspec.Struct, frozen=True):
    """One dist and why."""

    dist: str
    why: str
    installed: bool


class Declared(msgspec.Struct, frozen=True):
    """What a plugin of the repository says it is for; the file is written by tools/sync.py."""

    kind: str
    name: str
    dist: str
    platforms: tuple[str, ...] = ()
    formats: tuple[str, ...] = ()
    methods: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    models: tuple[str, ...] = ()
    named: bool = False  # experimental: only when it is named

    def runs_on(self, platform: str) -> bool:
        return "*" in self.platforms or platform in self.platforms


@cache
def declared() -> tuple[Declared, ...]:
    data = resources.files("lmkit_cli").joinpath("declared.json").read_bytes()
    return msgspec.json.decode(data, type=tuple[Declared, ...])


def platform_here() -> str:
    """The platform whose driver this machine has; "cpu" where it has none."""
    return next((name for name, files in DRIVERS.items() if any(Path(file).exists() for file in files)), "cpu")


def suggest(checkpoint: Checkpoint, platform: str) -> list[Suggestion]:
    """Every dist once, with the first reason for it."""
    found: dict[str, str] = {}
    for dist, why in _wanted(checkpoint, platform):
        found.setdefault(dist, why)
    return [Suggestion(dist, why, _installed(dist)) for dist, why in found.items()]


def command_line(suggestions: list[Suggestion]) -> str:
    """What installs all that is missing; "" when nothing is."""
    lines = [install(s.dist) for s in suggestions if not s.installed]
    parts = [line.removeprefix("pip install ").partition(", in a checkout")[0] for line in lines]
    return f"pip install {' '.join(parts)}" if parts else ""


def _wanted(checkpoint: Checkpoint, platform: str) -> Iterator[tuple[str, str]]:
    names = catalog()
    yield names["platform"][platform], f"platform {platform}"
    architecture = checkpoint.architecture
    yield names["model"].get(architecture, FALLBACK), f"model {architecture}"
    quantization = checkpoint.config.get("quantization_config")
    method = str(quantization.get("quant_method", "")) if isinstance(quantization, dict) else ""
    formats = {"plain"}
    for row in declared():
        if row.kind == "quantization" and method and method in row.methods:
            formats |= set(row.formats)
            yield row.dist, f"quantization {row.name}"
    for row in declared():
        if row.kind == "loader" and checkpoint.format in row.formats and not row.named:
            yield row.dist, f"loader of {checkpoint.format}"
        elif row.kind == "tokenizer" and _has(checkpoint.path, row.files):
            yield row.dist, f"tokenizer {row.name}"
        elif row.named or not row.runs_on(platform):
            continue
        elif row.kind == "attention":
            yield row.dist, f"attention {row.name}"
        elif row.kind == "op" and (not row.formats or formats & set(row.formats)):
            yield row.dist, f"kernel {row.name}"
        elif row.kind in ("tool_parser", "reasoning_parser") and _claims(row, checkpoint):
            yield row.dist, f"{row.kind.replace('_', ' ')} {row.name}"
    yield from ((names[kind][name], f"{kind.replace('_', ' ')} {name}") for kind, name in ALWAYS)
    yield from ((dist, "front end") for dist in ("lmkit-cli", "lmkit-http") if dist in folders())


def _claims(row: Declared, checkpoint: Checkpoint) -> bool:
    return any(fnmatchcase(name, glob) for name in (checkpoint.architecture, checkpoint.name) for glob in row.models)


def _has(path: Path, files: tuple[str, ...]) -> bool:
    """The checkpoint has one of them, or is one: ".gguf"."""
    return any((path / file).is_file() or path.suffix.lower() == file for file in files)


def _installed(dist: str) -> bool:
    try:
        metadata.distribution(dist)
    except metadata.PackageNotFoundError:
        return False
    return True

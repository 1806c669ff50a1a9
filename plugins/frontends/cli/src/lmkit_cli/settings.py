"""Where each value comes from. Precedence: command line > environment > file > default."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lmkit.config.codec import from_flat, to_dict
from lmkit.config.environment import Environment, parse_scalar, read_environment
from lmkit.config.options import plugin_key
from lmkit.config.schema import leaves
from lmkit.contracts.config import EngineConfig

from lmkit_cli.files import FileConfig, read_file


@dataclass(frozen=True, slots=True)
class Setting:
    """One value and who set it."""

    key: str
    value: object
    source: str  # "default", "file lmkit.toml", "environment LMKIT_ATTENTION", "command line --attention"


@dataclass(frozen=True, slots=True)
class Sourced:
    """A configuration with the provenance of every value."""

    config: EngineConfig
    sources: Mapping[str, str]  # dotted key -> who set it; keys with their default are absent
    environment: Environment = field(default_factory=Environment)
    disable: tuple[str, ...] = ()  # patterns of plugins never to load
    only: tuple[str, ...] = ()  # patterns of the only plugins to load
    official_only: bool = False

    def settings(self) -> list[Setting]:
        """All values, section by section, then plugin options."""
        data = to_dict(self.config)
        rows = []
        for key, leaf in leaves().items():
            section, _, name = key.rpartition(".")
            table = data[section] if section else data
            rows.append(Setting(key, table.get(name, leaf.default), self.sources.get(key, "default")))
        for plugin, options in data["plugins"].items():
            for option, value in options.items():
                key = f"plugins.{plugin}.{option}"
                rows.append(Setting(key, value, self.sources.get(key, "default")))
        return rows


def gather(
    flags: Mapping[str, object] | None = None,
    file: str | Path | None = None,
    environment: Environment | None = None,
    flag_names: Mapping[str, str] | None = None,
    official_only: bool = False,
) -> Sourced:
    """Merges the sources. `flags`: dotted key -> checked value. Raises ConfigError."""
    environment = read_environment() if environment is None else environment
    file = file or environment.switch("LMKIT_CONFIG") or None
    flat: dict[str, Any] = {}
    sources: dict[str, str] = {}
    found = read_file(file) if file else FileConfig({})
    for key, value in found.values.items():
        flat[key], sources[key] = value, f"file {file}"
    for key, value in environment.values.items():
        flat[key], sources[key] = value, f"environment {environment.names[key]}"
    for key, value in (flags or {}).items():
        flag = (flag_names or {}).get(key) or (leaves()[key].flag if key in leaves() else f"--{key}")
        flat[key], sources[key] = value, f"command line {flag}"
    return Sourced(from_flat(flat), sources, environment, found.disable, found.only, official_only)


def parse_dotted(args: Sequence[tuple[str, str]]) -> tuple[dict[str, object], dict[str, str]]:
    """Values of dotted flags: ("cache.block_size", "16") and ("attention.flashinfer.workspace_mb", "256").

    Returns (dotted key -> value, dotted key -> flag as written). Raises ConfigError.
    """
    values: dict[str, object] = {}
    names: dict[str, str] = {}
    for name, text in args:
        key, flag = name.replace("-", "_"), f"--{name}"
        if key in leaves():
            values[key] = leaves()[key].parse(text, f"command line {flag}")
        else:
            key = plugin_key(key)
            values[key] = parse_scalar(text)
        names[key] = flag
    return values, names

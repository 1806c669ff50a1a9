"""Configuration files: TOML or YAML, by suffix."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lmkit.api import ConfigError
from lmkit.config.codec import flatten

MAX_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class FileConfig:
    """What a file says: engine configuration by dotted key, and which plugins may be used ([plugins] disable, only)."""

    values: Mapping[str, Any]
    disable: tuple[str, ...] = ()
    only: tuple[str, ...] = ()


def read_file(path: str | Path) -> FileConfig:
    """A configuration file, checked. Raises ConfigError with the file and, if known, the line."""
    path = Path(path)
    try:
        if path.stat().st_size > MAX_BYTES:
            raise ConfigError(f"{path} is larger than {MAX_BYTES} bytes", fix="is this a configuration file?")
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}", fix="check the path given to --config") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text", fix="is this a configuration file?") from error
    data = _parse(path, text)
    plugins = data.get("plugins")
    switches = {}
    if isinstance(plugins, dict):
        switches = {name: _patterns(path, name, plugins.pop(name, ())) for name in ("disable", "only")}
    return FileConfig(flatten(data, str(path)), **switches)


def _patterns(path: Path, name: str, value: object) -> tuple[str, ...]:
    if not isinstance(value, (list, tuple)) or not all(isinstance(pattern, str) for pattern in value):
        raise ConfigError(f"plugins.{name} = {value!r} in {path}: needs a list of patterns", fix='["attention:toy"]')
    return tuple(value)


def _parse(path: Path, text: str) -> dict[str, Any]:
    if path.suffix == ".toml":
        try:
            return tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise ConfigError(f"{path} is not valid TOML: {error}", fix="correct that line") from error
    if path.suffix not in (".yaml", ".yml"):
        raise ConfigError(f"{path}: unknown kind of file {path.suffix!r}", fix="use .toml, .yaml or .yml")
    import yaml  # only when needed: it costs start-up time

    try:
        data = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not valid YAML: {error}", fix="correct that line") from error
    if data is None:
        return {}
    if not isinstance(data, dict) or not all(isinstance(key, str) for key in data):
        raise ConfigError(f"{path}: the top level must be a table with text keys", fix="see `lmkit show-config`")
    return data

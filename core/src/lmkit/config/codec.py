"""EngineConfig <-> plain dicts. Strict: an unknown key, a wrong type or a value outside its limits is an error."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from lmkit.api import ConfigError, UnknownKey
from lmkit.config.schema import leaves, sections
from lmkit.contracts.config import EngineConfig
from lmkit.kinds import BY_NAME


def to_dict(config: EngineConfig) -> dict[str, Any]:
    """Plain dicts and scalars; `from_dict(to_dict(c)) == c`."""
    data = asdict(config)
    data["plugins"] = {name: dict(options) for name, options in config.plugins.items()}
    for kind, name in data.pop("wanted").items():
        section, _, key = BY_NAME[kind].setting.rpartition(".")
        (data[section] if section else data)[key] = name
    return data


def from_dict(data: Mapping[str, Any], where: str = "configuration") -> EngineConfig:
    """The configuration written in `data`; absent keys have their defaults. Raises ConfigError."""
    return from_flat(flatten(data, where), where)


def flatten(data: Mapping[str, Any], where: str = "configuration") -> dict[str, Any]:
    """Nested sections -> dotted keys, checked. Plugin options become "plugins.KIND.NAME.OPTION"."""
    known = leaves()
    flat: dict[str, Any] = {}
    top = {*sections(), *(key for key in known if "." not in key), "plugins"}
    for name, value in data.items():
        if name == "plugins":
            flat.update(_flatten_plugins(_table(value, "plugins", where), where))
        elif name in sections():
            for inner, inner_value in _table(value, name, where).items():
                key = f"{name}.{inner}"
                if key not in known:
                    names = [k.partition(".")[2] for k in known if k.startswith(f"{name}.")]
                    raise UnknownKey(inner, names, f"[{name}] of {where}")
                flat[key] = known[key].check(inner_value, where)
        elif name in known:
            flat[name] = known[name].check(value, where)
        else:
            raise UnknownKey(name, top, where)
    return flat


def from_flat(flat: Mapping[str, Any], where: str = "configuration") -> EngineConfig:
    """The configuration of dotted keys (as `flatten` makes them)."""
    known = leaves()
    parts: dict[str, dict[str, Any]] = {}
    wanted: dict[str, str] = {}
    plugins: dict[str, dict[str, object]] = {}
    for key, value in flat.items():
        if key.startswith("plugins."):
            kind, name, option = key.split(".", 3)[1:]
            plugins.setdefault(f"{kind}.{name}", {})[option] = value
        elif kind := known[key].kind:
            if value != "auto":
                wanted[kind] = value
        else:
            section, _, name = key.rpartition(".")
            parts.setdefault(section, {})[name] = value
    root = parts.pop("", {})
    made = {name: sections()[name](**values) for name, values in parts.items()}
    return EngineConfig(**root, **made, wanted=wanted, plugins=plugins)


def _flatten_plugins(data: Mapping[str, Any], where: str) -> dict[str, Any]:
    """{"attention.flashinfer": {...}} and {"attention": {"flashinfer": {...}}} (as TOML nests it) mean the same."""
    flat: dict[str, Any] = {}
    for name, value in data.items():
        table = _table(value, f"plugins.{name}", where)
        nested = {name: table} if "." in name else {f"{name}.{inner}": v for inner, v in table.items()}
        for full, options in nested.items():
            if full.count(".") != 1:
                raise ConfigError(
                    f"plugins.{full} in {where} is not KIND.NAME", fix='write [plugins."attention.flashinfer"]'
                )
            for option, option_value in _table(options, f"plugins.{full}", where).items():
                flat[f"plugins.{full}.{option}"] = option_value
    return flat


def _table(value: object, name: str, where: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ConfigError(f"{name} = {value!r} in {where}: needs a table", fix=f"write [{name}] and its keys below")
    return value

"""Configuration from keyword options, and the names of plugin options."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lmkit.api import ConfigError, UnknownKey
from lmkit.config.codec import from_flat
from lmkit.config.schema import leaves
from lmkit.contracts.config import EngineConfig
from lmkit.kinds import GROUPS


def from_options(options: Mapping[str, object]) -> EngineConfig:
    """Keyword options of LLM(...): a field's name where it is unambiguous, its flag's name, or its dotted key.

    LLM("demo", dtype="float32", kv_memory="1GiB", **{"attention.flashinfer.workspace_mb": 256})
    """
    by_name = {leaf.flag.removeprefix("--").replace("-", "_"): leaf for leaf in leaves().values()}
    flat: dict[str, Any] = {}
    for name, value in options.items():
        if name == "plugins" and isinstance(value, Mapping):
            for plugin, plugin_options in value.items():
                flat.update({f"plugins.{plugin}.{option}": v for option, v in plugin_options.items()})
        elif leaf := by_name.get(name) or leaves().get(name):
            flat[leaf.key] = leaf.check(value, "LLM options")
        elif "." in name:
            flat[plugin_key(name)] = value
        else:
            raise UnknownKey(name, by_name, "LLM options")
    return from_flat(flat, "LLM options")


def plugin_key(name: str) -> str:
    """The dotted key of option KIND.NAME.OPTION: "plugins.KIND.NAME.OPTION". Raises UnknownKey."""
    parts = name.split(".")
    if len(parts) == 3 and parts[0] in GROUPS and all(parts):
        return "plugins." + name
    if len(parts) == 3:
        raise UnknownKey(parts[0], GROUPS, f"plugin option --{name}")
    if len(parts) == 2:
        raise UnknownKey(name, leaves(), "the command line")
    raise ConfigError(f"--{name} is not an option", fix="plugin options are written --KIND.NAME.OPTION VALUE")

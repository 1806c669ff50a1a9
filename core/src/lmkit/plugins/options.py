"""Options of plugins: a spec names a dataclass; its fields are the only keys, checked and converted here."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import msgspec

from lmkit.api import ConfigError, PluginError, Spec, UnknownKey
from lmkit.plugins.refs import ask, load_ref


def options_type(spec: Spec) -> type | None:
    """The options dataclass of a spec; its module must be torch-free. Raises PluginError when it is not a dataclass."""
    if spec.options is None:
        return None
    cls = ask(spec.options, load_ref, spec.options, spec.name)
    if not (isinstance(cls, type) and dataclasses.is_dataclass(cls)):
        raise PluginError(f"options of {spec.name!r}: {spec.options} is not a dataclass")
    return cls


def parse_options(kind: str, spec: Spec, given: Mapping[str, object]) -> dict[str, Any]:
    """All options of a spec with their values, given or default, JSON-able. Text is converted ("256" -> 256).

    Raises UnknownKey for a key the dataclass lacks, ConfigError for a value of the wrong type or that it refuses.
    """
    where = f"options of {kind}.{spec.name}"
    cls = options_type(spec)
    known = [f.name for f in dataclasses.fields(cls)] if cls else []
    for key in given:
        if key not in known:
            raise UnknownKey(key, known, where)
    if cls is None:
        return {}
    try:
        value: Any = msgspec.convert(dict(given), type=cls, strict=False)
    except (msgspec.ValidationError, ValueError, TypeError) as e:
        raise ConfigError(f"{where}: {e}", fix=f"lmkit plugins show {kind}:{spec.name}") from e
    result: dict[str, Any] = msgspec.to_builtins({name: getattr(value, name) for name in known})
    return result

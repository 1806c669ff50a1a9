"""The fields of EngineConfig as data: dotted key, type, default, limits, documentation, flag, environment variable."""

from __future__ import annotations

import types
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cache
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

from lmkit.api import ConfigError, canonical
from lmkit.config.sizes import parse_budget
from lmkit.contracts.config import EngineConfig
from lmkit.contracts.marks import Between, Flag, MemoryBudget, OneOf, Several

WORDS = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}


@dataclass(frozen=True, slots=True)
class Leaf:
    """One configuration value."""

    key: str  # "cache.block_size"; "attention" for a field of EngineConfig itself
    type: type  # str, int or bool
    optional: bool  # None is a value ("not given")
    default: object
    doc: str
    flag: str  # "--block-size"
    limits: Between | OneOf | MemoryBudget | None = None
    several: bool = False  # parts with commas between: the flag may be given once for each

    @property
    def section(self) -> str:
        return self.key.rpartition(".")[0]

    @property
    def env(self) -> str:
        """Name of its environment variable: LMKIT_CACHE__BLOCK_SIZE."""
        return "LMKIT_" + self.key.replace(".", "__").upper()

    def check(self, value: object, where: str) -> object:
        """The value, if it has the right type and lies within limits. Raises ConfigError naming key and place."""
        if value is None and self.optional:
            return None
        if self.type is str and self.limits and isinstance(value, str) and self.key.endswith("dtype"):
            value = canonical(value)
        right = isinstance(value, self.type) and not (self.type is int and isinstance(value, bool))
        if not right:
            raise ConfigError(
                f"{self.key} = {value!r} in {where}: needs {_TYPE_NAMES[self.type]}", fix=f"{self.key}: {self.doc}"
            )
        if isinstance(self.limits, Between):
            low, high = self.limits.low, self.limits.high
            if (low is not None and value < low) or (high is not None and value > high):  # type: ignore[operator]
                raise ConfigError(f"{self.key} = {value} in {where}: needs an integer {self.limits}", fix=self.doc)
        elif isinstance(self.limits, OneOf) and value not in self.limits.words:
            raise ConfigError(f"{self.key} = {value!r} in {where}: not understood", fix=f"use one of {self.limits}")
        elif isinstance(self.limits, MemoryBudget):
            parse_budget(str(value), 0, f"{self.key} in {where}")
        return value

    def parse(self, text: str, where: str) -> object:
        """The checked value of a text from the command line or the environment."""
        if self.optional and text.strip().lower() in ("none", ""):
            return None
        value: object = text
        if self.type is int:
            try:
                value = int(text.replace("_", ""))
            except ValueError:
                value = text
        elif self.type is bool:
            value = WORDS.get(text.strip().lower(), text)
        return self.check(value, where)


_TYPE_NAMES = {str: "text", int: "an integer", bool: "true or false"}


@cache
def leaves() -> Mapping[str, Leaf]:
    """All values of EngineConfig by dotted key, in order of declaration. Plugin options are not among them."""
    found: dict[str, Leaf] = {}
    for name, hint in get_type_hints(EngineConfig, include_extras=True).items():
        if name == "plugins":
            continue
        section = _dataclass_in(hint)
        if section is None:
            found[name] = _leaf(EngineConfig, name, hint, "")
            continue
        for inner, inner_hint in get_type_hints(section, include_extras=True).items():
            found[f"{name}.{inner}"] = _leaf(section, inner, inner_hint, name)
    return types.MappingProxyType(found)


@cache
def sections() -> Mapping[str, type]:
    """Section name -> its dataclass ("cache" -> CacheConfig)."""
    hints = get_type_hints(EngineConfig, include_extras=True)
    return {name: found for name, hint in hints.items() if (found := _dataclass_in(hint)) is not None}


def _dataclass_in(hint: Any) -> type | None:
    candidates = (hint, *get_args(hint))
    return next((c for c in candidates if isinstance(c, type) and is_dataclass(c)), None)


def _leaf(owner: type, name: str, hint: Any, section: str) -> Leaf:
    assert get_origin(hint) is Annotated, f"{owner.__name__}.{name} has no documentation"
    kind, doc, *marks = get_args(hint)
    options = get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)
    default = next(f.default for f in fields(owner) if f.name == name)
    flag = next((m.name for m in marks if isinstance(m, Flag)), name.replace("_", "-"))
    return Leaf(
        key=f"{section}.{name}" if section else name,
        type=next(t for t in options if t is not type(None)),
        optional=type(None) in options or default is MISSING,
        default=None if default is MISSING else default,
        doc=doc,
        flag=f"--{flag}",
        limits=next((m for m in marks if not isinstance(m, (Flag, Several))), None),
        several=any(isinstance(m, Several) for m in marks),
    )

"""The values of EngineConfig as data: dotted key, type, default, limits, documentation, flag, environment variable.

They are the fields of its sections, and for each kind of plugins that users may name the key that the kind's file says.
"""

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
from lmkit.kinds import KINDS, Kind

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
    kind: str = ""  # of the plugins that it names; "" = a field of a section

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
    """All values of EngineConfig by dotted key, section by section. Plugin options are not among them."""
    found: list[Leaf] = []
    for section, owner in {**sections(), "": EngineConfig}.items():
        hints = get_type_hints(owner, include_extras=True)
        found += [_leaf(owner, name, hint, section) for name, hint in hints.items() if get_origin(hint) is Annotated]
        found += [_naming(kind) for kind in KINDS if kind.setting and kind.setting.rpartition(".")[0] == section]
    return types.MappingProxyType({leaf.key: leaf for leaf in found})


@cache
def sections() -> Mapping[str, type]:
    """Section name -> its dataclass ("cache" -> CacheConfig)."""
    hints = get_type_hints(EngineConfig)
    return {name: hint for name, hint in hints.items() if isinstance(hint, type) and is_dataclass(hint)}


def _naming(kind: Kind) -> Leaf:
    """The value under which users name a plugin of a kind."""
    flag = f"--{kind.name.replace('_', '-')}"
    return Leaf(kind.setting, str, optional=False, default="auto", doc=kind.words, flag=flag, kind=kind.name)


def _leaf(owner: type, name: str, hint: Any, section: str) -> Leaf:
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

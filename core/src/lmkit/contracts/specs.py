"""What a plugin registers: one frozen dataclass per implementation, with a lazy reference to the code.

A spec holds everything selection can decide on without importing the implementation. `target` is "package.module:Attr";
it is imported only when the implementation is chosen.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, fields
from enum import IntEnum
from functools import cache
from typing import Literal, get_type_hints

import msgspec

from lmkit.contracts.device import DeviceInfo
from lmkit.contracts.errors import PluginError

Ref = str  # "package.module:Attr"
REF = re.compile(r"^[A-Za-z_][\w.]*:[A-Za-z_][\w.]*$")
NAME = re.compile(r"^[a-z0-9][a-z0-9_-]*$")


class Tier(IntEnum):
    """How good an implementation is for its device; `auto` prefers the higher."""

    REFERENCE = 0
    PORTABLE = 1
    OPTIMIZED = 2


@dataclass(frozen=True, slots=True)
class Dims:
    """Which sizes are supported: a set, multiples of a number up to a maximum, or any."""

    values: frozenset[int] = frozenset()
    multiple: int = 0
    maximum: int = 0  # 0 = no maximum

    def __contains__(self, value: int) -> bool:
        if self.values:
            return value in self.values
        return value > 0 and value % (self.multiple or 1) == 0 and (not self.maximum or value <= self.maximum)

    def __str__(self) -> str:
        if self.values:
            return "{" + ",".join(map(str, sorted(self.values))) + "}"
        text = f"multiple of {self.multiple}" if self.multiple else "any"
        return f"{text} up to {self.maximum}" if self.maximum else text


ANY = Dims()


def one_of(*values: int) -> Dims:
    """These values and no others."""
    return Dims(values=frozenset(values))


def multiple_of(n: int, max: int = 0) -> Dims:
    """Multiples of n, up to max where one is given."""
    return Dims(multiple=n, maximum=max)


@dataclass(frozen=True, slots=True)
class Range:
    """A half-open range of capabilities: low <= capability < high; None = unbounded."""

    low: tuple[int, int] | None = None
    high: tuple[int, int] | None = None

    def __contains__(self, value: tuple[int, int]) -> bool:
        return (self.low is None or value >= self.low) and (self.high is None or value < self.high)

    def __str__(self) -> str:
        low = f">= {self.low[0]}.{self.low[1]}" if self.low else ""
        high = f"< {self.high[0]}.{self.high[1]}" if self.high else ""
        return " and ".join(part for part in (low, high) if part) or "any"


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a spec came from. Stamped by the host."""

    dist: str
    version: str
    module: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """Fields common to all kinds. Raises PluginError when a field is malformed."""

    name: str  # equals the entry-point name (kind model: the entry-point name is in `architectures`)
    summary: str  # one line for lists and --help
    target: Ref
    interface: int = 1  # interface number of this kind the plugin was written for
    requires: tuple[str, ...] = ()  # PEP 508; checked in metadata, never imported
    options: Ref | None = None  # a dataclass: its fields become flags, environment variables and TOML keys
    tier: Tier = Tier.OPTIMIZED
    stability: Literal["stable", "beta", "experimental"] = "beta"  # experimental is never picked by auto
    check: Ref | None = None  # (request) -> Iterable[Refusal]; torch-free; imported only if the data stages pass
    platforms: tuple[str, ...] = ("*",)
    capability: Range | None = None
    origin: Origin | None = None

    def __post_init__(self) -> None:
        problems = []
        for field_name, kind in _types(type(self)).items():  # type: ignore[arg-type]
            try:
                msgspec.convert(value := getattr(self, field_name), kind)
            except msgspec.ValidationError as e:
                raise PluginError(f"{type(self).__name__}: {field_name} is {value!r:.60}: {e}") from e
        if not NAME.match(self.name):
            problems.append(f"name {self.name!r} must match {NAME.pattern}")
        for field_name in ("target", "options", "check"):
            ref = getattr(self, field_name)
            if ref is not None and not REF.match(ref):
                problems.append(f"{field_name} {ref!r} must be written 'package.module:Attr'")
        if not self.summary or "\n" in self.summary:
            problems.append("summary must be one line")
        if problems:
            raise PluginError(f"{type(self).__name__}: " + "; ".join(problems))


_types = cache(get_type_hints)


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectRequest:
    """Base of what is asked of the resolver: choose an implementation of `kind`."""

    kind: str
    component: str = ""  # "text", "draft"; "" where there is only one
    device: DeviceInfo | None = None
    dtype: str | None = None
    features: frozenset[str] = frozenset()  # what must be declared, by name

    def needed(self) -> frozenset[str]:
        """All features that a spec must declare."""
        return self.features

    def facts(self) -> dict[str, object]:
        """What `explain` shows of the request beside its device: what its kind added, as plain data."""
        common = {f.name for f in fields(SelectRequest)}
        added = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in common}
        return {name: value for name, value in added.items() if value is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorCheck:
    """A health check of a plugin: `target` is () -> None | str, where a string is the problem."""

    name: str
    summary: str
    target: Ref
    level: Literal["warning", "error"] = "error"  # warning: it works, but not as well as it could


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchmarkSpec:
    """Kernels that `lmkit bench kernels` measures: `target` is () -> Iterable[BenchmarkCase], imported only there."""

    name: str
    summary: str
    target: Ref


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchmarkCase:
    """One kernel on one shape. Made when its turn comes, so that cases do not hold memory at the same time."""

    name: str  # "rms_norm 1x896"
    run: Callable[[], object]  # does the work once
    bytes: int  # that have to be read or written at least once
    flops: int = 0  # a multiply-add is two
    dtype: str = "float32"  # of the multiplications: which limit of the machine applies
    limit: Literal["", "read", "flops"] = ""  # reads, or multiplies, and nothing else: its rate is the machine's limit


@dataclass(frozen=True, slots=True)
class ConfigProposal:
    """A plugin's wish for a configuration value; the core merges, users win."""

    key: str  # "cache.block_size"
    value: object
    reason: str
    strength: Literal["prefer", "require"] = "prefer"

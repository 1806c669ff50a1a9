"""Strict reading of `quantization_config`: every key is understood, or refused by name."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import TypeVar

import regex
from lmkit.api import LinearSpec, UnsupportedModel

T = TypeVar("T")

WHERE = "quantization_config"
MAX_NAMES = 10_000  # of modules, in one list
MAX_PATTERN = 500  # characters
MAX_SHOWN = 200  # characters of a value in a message
SECONDS = 0.2  # for one pattern on one name: a stranger wrote it
PLAIN_NAME = re.compile(r"^[\w.-]{1,200}$")
GLOB = re.compile(r"(?=.{1,200}\Z)[\w.-]*(?:[*][\w.-]*){0,8}\Z")
MAX_GLOBS = 1000  # with *, in one list


class Settings:
    """The keys of a `quantization_config`. What nobody has read when `done` is called is refused.

    Errors are UnsupportedModel, naming key, value and what is supported.
    """

    def __init__(self, given: Mapping[str, object], ignored: Collection[str] = (), where: str = WHERE) -> None:
        """`ignored`: keys that say how the weights were found, and not how they are stored."""
        self._given, self._where = given, where
        self._known = set(ignored)

    def get(self, key: str, default: object = None) -> object:
        """As it is; for what needs a check of its own."""
        self._known.add(key)
        return self._given.get(key, default)

    def one_of(self, key: str, values: Sequence[T], default: T) -> T:
        """One of `values`; 1 is not True."""
        found = self.get(key, default)
        for value in values:
            if type(found) is type(value) and found == value:
                return value
        raise self.unsupported(key, ", ".join(map(repr, values)))

    def flag(self, key: str, default: bool) -> bool:
        return self.one_of(key, (True, False), default)

    def group(self, key: str, default: int) -> int:
        """Columns that share a scale, a multiple of 8; 0 for -1, which means all."""
        found = self.get(key, default)
        if type(found) is not int or (found != -1 and (found <= 0 or found % 8)):
            raise self.unsupported(key, "-1 or a multiple of 8")
        return max(found, 0)

    def names(self, key: str) -> tuple[str, ...]:
        """A list of names of modules, no patterns; null is none."""
        found = self.get(key) or []
        if isinstance(found, list | tuple) and len(found) <= MAX_NAMES:
            names = [n for n in found if isinstance(n, str) and PLAIN_NAME.match(n)]
            if len(names) == len(found):
                return tuple(names)
        raise self.unsupported(key, "a list of module names (no patterns)")

    def globs(self, key: str) -> tuple[Pattern, ...]:
        """A list of names of modules or their ends, `*` for any text, with all that is in them; null is none."""
        found = self.get(key) or []
        if isinstance(found, list | tuple) and len(found) <= MAX_NAMES:
            names = [n for n in found if isinstance(n, str) and GLOB.match(n)]
            if len(names) == len(found) and sum("*" in n for n in names) <= MAX_GLOBS:
                texts = (n.replace(".", "[.]").replace("*", ".*") for n in names)
                return tuple(Pattern(f"(?:.*[.])?{text}(?:[.]|$)", key) for text in texts)
        raise self.unsupported(key, f"a list of module names, at most {MAX_GLOBS} of them with *")

    def float8_cache(self, key: str) -> None:
        """Null, or an object that says that keys and values were measured for a float8 cache: a scale for each tensor.

        It does not choose the cache: weights are the same with any.
        """
        found = self.get(key)
        if found is None:
            return
        if not isinstance(found, Mapping):
            raise self.unsupported(key, "null, or an object that says how keys and values are cached")
        given = Settings(found, ("observer", "observer_kwargs"), f"{self._where}.{key}")
        given.one_of("num_bits", (8,), 8)
        given.one_of("type", ("float",), "")
        given.one_of("strategy", ("tensor", None), None)
        given.one_of("dynamic", (False,), False)
        given.one_of("symmetric", (True,), True)
        for name in ("group_size", "block_structure", "actorder", "scale_dtype", "zp_dtype"):
            given.one_of(name, (None, *(("torch.float8_e4m3fn",) if name == "zp_dtype" else ())), None)
        given.done()

    def unsupported(self, key: str, supported: str) -> UnsupportedModel:
        """The error for the value of `key`."""
        return UnsupportedModel(f"{self._where}.{key}", _short(self._given.get(key)), supported)

    def done(self) -> None:
        """Raises UnsupportedModel for a key that was not read."""
        for key, value in self._given.items():
            if key not in self._known:
                known = ", ".join(sorted(self._known))
                raise UnsupportedModel(f"{self._where}.{key[:MAX_SHOWN]}", _short(value), f"keys {known}")


def _short(value: object) -> object:
    """The value, or as much of it as a message should show."""
    shown = repr(value)
    return value if len(shown) <= MAX_SHOWN else f"{shown[:MAX_SHOWN]}..."


def names_module(entry: str, module: str) -> bool:
    """Whether an entry of a list names this module: its full name, the start or the end of it, at a dot."""
    return f".{module}.".startswith(f".{entry}.") or f".{module}.".endswith(f".{entry}.")


def of_layer(layer: LinearSpec) -> tuple[str, ...]:
    """The names that a checkpoint has for what was merged into `layer`."""
    return layer.sources or (layer.name,)


def agreed(layer: LinearSpec, found: Sequence[T], key: str) -> T:
    """What holds for all parts of a merged layer. Raises UnsupportedModel where they differ."""
    if any(each != found[0] for each in found):
        raise UnsupportedModel(f"{WHERE}.{key}", of_layer(layer), f"the same for all of {layer.name}, which is merged")
    return found[0]


class Pattern:
    """A regular expression of a checkpoint, at the beginning of names. Raises UnsupportedModel."""

    def __init__(self, text: str, key: str) -> None:
        self.text, self.key = text, f"{WHERE}.{key}"
        if len(text) > MAX_PATTERN:
            raise UnsupportedModel(self.key, text[:80] + "...", f"patterns of at most {MAX_PATTERN} characters")
        try:
            self._compiled = regex.compile(text)
        except regex.error as e:
            raise UnsupportedModel(self.key, text, f"regular expressions ({e})") from e

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Pattern) and other.text == self.text

    def __hash__(self) -> int:
        return hash(self.text)

    def matches(self, name: str) -> bool:
        try:
            return self._compiled.match(name, timeout=SECONDS) is not None
        except TimeoutError:
            raise UnsupportedModel(self.key, self.text, "patterns that are quick to match") from None

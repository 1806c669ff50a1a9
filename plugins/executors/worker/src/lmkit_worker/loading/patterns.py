"""Regular expressions that an adapter's file gives for names of modules: Python's meaning, and a bound on the work.

PEFT matches them with `re`, which a pattern from a stranger can keep busy for years. Names with dots, of which tools
write thousands, are looked up; other patterns are matched by `regex`, which has a timeout, after `re` has accepted
them.
"""

from __future__ import annotations

import re
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import regex
from lmkit.api import UnsupportedModel

MAX_PATTERNS = 64  # that are more than names
MAX_LENGTH = 4096  # characters of a pattern
MAX_GROUPS = 1024  # of names with their dots in the same places
SECONDS = 1.0  # of this thread's processor time, for all patterns of an adapter
SHOWN = 80  # characters of a pattern that an error shows
NAME = re.compile(r"\^?(?:[\w\-]|\\?\.)+\$?", re.ASCII)
OTHER_SYNTAX = re.compile(r"\{(?!\d+\}|\d*,\d*\})|\[\[:")  # `regex` reads these otherwise than `re` does


class Budget:
    """Processor time that is left for matching."""

    def __init__(self, seconds: float = SECONDS) -> None:
        self.left = seconds

    @contextmanager
    def spent(self) -> Iterator[float]:
        """Counts what is done within; yields what is left. Raises TimeoutError where that is nothing."""
        if self.left <= 0:
            raise TimeoutError
        begin = time.thread_time()
        try:
            yield self.left
        finally:
            self.left -= time.thread_time() - begin


class Expression:
    """A regular expression of the key `key`. Raises UnsupportedModel where `re` does not accept it or it takes long."""

    def __init__(self, key: str, pattern: str, budget: Budget, before: str = "", after: str = "") -> None:
        """`before` and `after`: what PEFT puts around the pattern, which is matched against whole names."""
        self.key, self.pattern, self.budget = key, pattern, budget
        if len(pattern) > MAX_LENGTH or OTHER_SYNTAX.search(pattern):
            raise self._refused(f"regular expressions of at most {MAX_LENGTH} characters")
        whole = f"{before}{pattern}{after}"
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                re.compile(whole)
                self.compiled = regex.compile(whole)
        except (re.error, regex.error, OverflowError, RecursionError, ValueError, Warning) as e:
            raise self._refused(f"regular expressions ({e!s:.100})") from None

    def matches(self, name: str) -> bool:
        """True where the whole name matches."""
        return self.match(name) is not None

    def match(self, name: str) -> regex.Match[str] | None:
        try:
            with self.budget.spent() as left:
                return self.compiled.fullmatch(name, timeout=left)
        except TimeoutError:
            raise self._refused("patterns that are quick to match") from None

    def _refused(self, possible: str) -> UnsupportedModel:
        return UnsupportedModel(self.key, self.pattern[:SHOWN], possible)


class Patterns:
    """Pattern -> value, as in PEFT: the first one counts that matches a module's name or what follows a dot in it."""

    def __init__(self, key: str, given: Any, budget: Budget) -> None:
        if given is not None and not isinstance(given, Mapping):
            raise UnsupportedModel(key, repr(given)[:SHOWN], "an object")
        values: Mapping[str, Any] = given or {}
        self.key, self.budget = key, budget
        self.values = list(values.values())
        self.names = Names()
        self.others: list[tuple[int, Expression]] = []
        for number, pattern in enumerate(values):
            if NAME.fullmatch(pattern):
                self.names.add(number, pattern)
            else:
                self.others.append((number, Expression(key, pattern, budget, r"(.*\.)?(", ")$")))
            if len(self.others) > MAX_PATTERNS or self.names.num_groups > MAX_GROUPS:
                raise UnsupportedModel(key, pattern[:SHOWN], f"at most {MAX_PATTERNS} patterns that are not names")

    def find(self, name: str, default: Any) -> Any:
        """The value for the module of this name."""
        if not self.values:
            return default
        try:
            with self.budget.spent():
                number = self.names.first(name)
        except TimeoutError:
            raise UnsupportedModel(
                self.key, f"{len(self.values)} patterns", "patterns that are quick to match"
            ) from None
        for earlier, expression in self.others:
            if number is not None and earlier > number:
                break
            if expression.matches(name):
                number = earlier
                break
        return default if number is None else self.values[number]


class Names:
    """Patterns that are names: "." stands for any character, "\\." for a dot, "^" for the beginning of the whole name.

    They are grouped by length and by where they have a "." that stands for any character: with these places blanked, a
    name is looked up.
    """

    def __init__(self) -> None:
        self.groups: dict[int, dict[tuple[int, ...], dict[tuple[str, bool], int]]] = {}
        self.num_groups = 0

    def add(self, number: int, pattern: str) -> None:
        tokens = re.findall(r"\\\.|.", pattern.removesuffix("$").removeprefix("^"))
        places = tuple(place for place, token in enumerate(tokens) if token == ".")
        of_length = self.groups.setdefault(len(tokens), {})
        self.num_groups += places not in of_length
        text, whole = "".join(token[-1] for token in tokens), pattern.startswith("^")
        of_length.setdefault(places, {}).setdefault((text, whole), number)

    def first(self, name: str) -> int | None:
        """The number of the first pattern that matches."""
        numbers: list[int] = []
        for begin in (0, *(place + 1 for place, character in enumerate(name) if character == ".")):
            for places, of_places in self.groups.get(len(name) - begin, {}).items():
                characters = list(name[begin:])
                for place in places:
                    characters[place] = "."
                text = "".join(characters)
                wholes = (False, True) if begin == 0 else (False,)
                numbers += [of_places[text, whole] for whole in wholes if (text, whole) in of_places]
        return min(numbers, default=None)

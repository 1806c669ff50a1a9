"""Patterns that an adapter's file gives for names of modules: regular expressions from outside, of a harmless kind."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from lmkit.api import UnsupportedModel

MOST, LONGEST, REPEATS = 16, 256, 2  # patterns that are more than names, characters, repetitions in one
NAME = re.compile(r"\^?[\w.\-]+\$?")
HARMLESS = re.compile(r"[\w.\-\\|()^$\[\]*+]*")
REPEATED_GROUP = re.compile(r"[)*+][*+]|\\(?![.d])")


class Patterns:
    """Name or pattern -> value. One that ends a module's name, behind a dot, is meant."""

    def __init__(self, key: str, given: Any) -> None:
        if given is not None and not isinstance(given, Mapping):
            raise UnsupportedModel(key, repr(given)[:80], "an object")
        found: Mapping[str, Any] = given or {}
        self.values = list(found.values())
        self.names = {name.strip("^$"): value for name, value in found.items() if NAME.fullmatch(name)}
        others = {name: value for name, value in found.items() if not NAME.fullmatch(name)}
        if len(others) > MOST or any(not _harmless(pattern) for pattern in others):
            raise UnsupportedModel(
                key,
                [name[:80] for name in list(others)[:4]],
                f"at most {MOST} patterns, with at most {REPEATS} * or + each",
            )
        try:
            self.others = [(re.compile(rf"(.*\.)?({pattern})$"), value) for pattern, value in others.items()]
        except re.error as e:
            raise UnsupportedModel(
                key, [name[:80] for name in list(others)[:4]], f"regular expressions ({e})"
            ) from None

    def find(self, names: Sequence[str], default: Any) -> Any:
        """The value for what is called by one of `names`."""
        for name in names:
            parts = name.split(".")
            for i in range(len(parts)):
                if (end := ".".join(parts[i:])) in self.names:
                    return self.names[end]
            for pattern, value in self.others:
                if pattern.match(name):
                    return value
        return default


def _harmless(pattern: str) -> bool:
    few = len(pattern) <= LONGEST and pattern.count("*") + pattern.count("+") <= REPEATS
    return few and HARMLESS.fullmatch(pattern) is not None and REPEATED_GROUP.search(pattern) is None

"""Finds literal markers in a text that is still arriving."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

BLANKS = " \t\r\n"
MAX_GAP = 64  # blanks that are held back while it is open what follows them
_BLANKS = re.compile(r"[ \t\r\n]*")


class Found(NamedTuple):
    """text[:begin] holds no marker. `marker` None: the rest is undecided, or empty."""

    begin: int
    end: int
    marker: str | None


_found = tuple.__new__  # a third of the time of Found(...)


class Markers:
    """The longest of several literal markers at the first place where there is one."""

    __slots__ = ("_pattern", "_prefixes", "_reach")

    def __init__(self, markers: Iterable[str]) -> None:
        ordered = sorted(set(markers), key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, ordered)) or r"(?!)")
        self._prefixes = frozenset(m[:k] for m in ordered for k in range(1, len(m)))
        self._reach = max(map(len, ordered), default=1) - 1

    def find(self, text: str, at: int, final: bool = False, limit: int | None = None) -> Found:
        """The first marker at or after `at`; with `final` no more text comes.

        With `limit` only markers that begin within so many characters count: nobody wants those behind.
        """
        size = len(text)
        if limit is not None and at + limit + self._reach + 1 < size:
            size, final = at + limit + self._reach + 1, False
        match = self._pattern.search(text, at, size)
        if match is not None:
            first, end = match.span()
            if first < size - self._reach:
                return _found(Found, (first, end, match.group()))
        begin = size if final else self._undecided(text, at, size)
        if match is None or begin <= first:  # what began there may become an earlier or longer marker
            return _found(Found, (begin, size, None))
        return _found(Found, (first, end, match.group()))

    def at(self, text: str, at: int, final: bool = False) -> Found | None:
        """The marker that stands at `at`, maybe after blanks. None: none does; `marker` None: undecided."""
        begin = skip_blanks(text, at)
        left = len(text) - begin
        if (
            not final
            and begin - at <= MAX_GAP
            and (not left or (left <= self._reach and text[begin:] in self._prefixes))
        ):
            return _found(Found, (begin, len(text), None))
        match = self._pattern.match(text, begin)
        return _found(Found, (begin, match.end(), match.group())) if match else None

    def _undecided(self, text: str, at: int, size: int) -> int:
        for begin in range(max(at, size - self._reach), size):
            if text[begin:size] in self._prefixes:
                return begin
        return size


@lru_cache(maxsize=1024)
def markers(*texts: str) -> Markers:
    """Compiled once per set of markers."""
    return Markers(t for t in texts if t)


def skip_blanks(text: str, at: int) -> int:
    return _BLANKS.match(text, at).end()  # type: ignore[union-attr]

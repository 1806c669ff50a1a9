"""Patterns that only a few texts fit: `^score$`, `^(width|height)$`, `^line[1-3]$`.

llguidance lets a comma follow the last property as long as a pattern may name another one, and then finds no name that
is left. As properties with names of their own they have no such end.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import product
from typing import Any

MAX_TEXTS = 64  # of one pattern
_CLASS = re.compile(r"\[((?:\\[\]\[\\^-]|[\w .:/@$-])+)\]")
_COUNT = re.compile(r"\{(\d{1,2})(?:,(\d{1,2}))?\}|\?")
_PLAIN = re.compile(r"\\([^\w\s])|([^\\^$.|?*+()\[\]{}])")


class _TooMany(Exception):
    """The pattern fits more texts than are listed, or is none that is read here."""


def texts_of(pattern: str) -> list[str] | None:
    """All texts that a pattern fits; None where they are many, or it is of another kind."""
    try:
        texts, end = _alternatives(pattern, 0, is_top=True)
    except _TooMany:
        return None
    return sorted(set(texts)) if end == len(pattern) else None


def with_names(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schema, in which patterns of property names that fit few of them are properties."""
    named: dict[str, list[str]] = {}
    for pattern in schema.get("patternProperties", {}):
        if (texts := texts_of(pattern)) is not None:
            named[pattern] = texts
    if not named:
        return schema
    patterns = schema["patternProperties"]
    properties = dict(schema.get("properties", {}))
    for pattern, texts in named.items():
        for text in texts:
            part = patterns[pattern]
            properties[text] = {"allOf": [properties[text], part]} if text in properties else part
    rest = {pattern: part for pattern, part in patterns.items() if pattern not in named}
    made = {key: value for key, value in schema.items() if key != "patternProperties"} | {"properties": properties}
    return made | {"patternProperties": rest} if rest else made


def _alternatives(pattern: str, at: int, *, is_top: bool = False) -> tuple[list[str], int]:
    texts: list[str] = []
    while True:
        if is_top and not pattern.startswith("^", at):
            raise _TooMany
        found, at = _sequence(pattern, at + is_top)
        texts += found
        if len(texts) > MAX_TEXTS:
            raise _TooMany
        if is_top:
            if not pattern.startswith("$", at):
                raise _TooMany
            at += 1
        if not pattern.startswith("|", at):
            return texts, at
        at += 1


def _sequence(pattern: str, at: int) -> tuple[list[str], int]:
    texts = [""]
    while at < len(pattern) and pattern[at] not in "|)$":
        piece, at = _piece(pattern, at)
        if count := _COUNT.match(pattern, at):
            least, most = (0, 1) if count.group() == "?" else (int(count[1]), int(count[2] or count[1]))
            piece = [text for n in range(least, most + 1) for text in _times(piece, n)]
            at = count.end()
        texts = _joined(texts, piece)
    return texts, at


def _piece(pattern: str, at: int) -> tuple[list[str], int]:
    if pattern.startswith("(", at):
        inner, end = _alternatives(pattern, at + (3 if pattern.startswith("(?:", at) else 1))
        if not pattern.startswith(")", end):
            raise _TooMany
        return inner, end + 1
    if found := _CLASS.match(pattern, at):
        return _characters(found[1]), found.end()
    if found := _PLAIN.match(pattern, at):
        return [found[1] or found[2]], found.end()
    raise _TooMany


def _characters(inside: str) -> list[str]:
    found = [
        chr(code)
        for first, last, plain in re.findall(r"(\w)-(\w)|\\?(.)", inside)
        for code in (range(ord(first), ord(last) + 1) if first else [ord(plain)])
    ]
    if len(found) > MAX_TEXTS:
        raise _TooMany
    return found


def _times(texts: list[str], n: int) -> list[str]:
    made = [""]
    for _ in range(n):
        made = _joined(made, texts)
    return made


def _joined(first: list[str], then: list[str]) -> list[str]:
    if len(first) * len(then) > MAX_TEXTS:
        raise _TooMany
    return [a + b for a, b in product(first, then)]

"""The shape of a JSON text: how many members, containers and values it has, before anything is made of it.

A parser makes an object of each, and holds the interpreter while it does. Counting is done by numpy, piece by piece, so
that other threads run meanwhile. What is counted of a text that is not JSON means nothing; the parser refuses it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from lmkit.api import RequestError

MAX_DEPTH = 128
MAX_MEMBERS = 1 << 15  # "name": value, all objects together
MAX_CONTAINERS = 1 << 15  # objects and lists
_PIECE = 1 << 18
_QUOTE, _ESCAPE = ord('"'), ord("\\")
_COMMA, _COLON, _LIST, _LIST_END, _OBJECT, _OBJECT_END = b",:[]{}"


@dataclass(slots=True)
class Shape:
    members: int = 0
    containers: int = 0
    commas: int = 0
    depth: int = 0  # of the deepest container


class TooComplex(RequestError):
    code = "too-complex"


def check_shape(text: bytes | bytearray, max_values: int, field: str | None = None) -> None:
    """Raises TooComplex. `max_values`: of lists and objects, all together."""
    for s in _shapes(text):
        found = (
            (s.members, MAX_MEMBERS, "object members"), (s.containers, MAX_CONTAINERS, "lists and objects"),
            (s.commas, max_values, "values"), (s.depth, MAX_DEPTH, "levels of lists and objects"),
        )  # fmt: skip
        for count, limit, what in found:
            if count > limit:
                error = TooComplex(f"{field or 'the body'} has more than {limit} {what}", fix="send less at once")
                error.field = field
                raise error


def shape_of(text: bytes | bytearray) -> Shape:
    *_, last = _shapes(text)
    return last


def _shapes(text: bytes | bytearray) -> Iterator[Shape]:
    """The shape of longer and longer parts of the text, of the whole at last."""
    shape, depth, inside, escaped = Shape(), 0, 0, 0
    for at in range(0, len(text), _PIECE):
        piece = np.frombuffer(text, np.uint8, min(_PIECE, len(text) - at), at)
        quotes, escaped = _quotes(piece, escaped)
        flags = np.zeros(len(piece), np.uint8)
        flags[quotes] = 1
        within = (np.cumsum(flags, dtype=np.uint32) + inside) & 1
        inside = int(within[-1])
        outside = piece[within == 0]
        counts = np.bincount(outside, minlength=256)
        shape.members += int(counts[_COLON])
        shape.commas += int(counts[_COMMA])
        opened = int(counts[_LIST] + counts[_OBJECT])
        shape.containers += opened
        if opened or counts[_LIST_END] or counts[_OBJECT_END]:
            up = (outside == _LIST) | (outside == _OBJECT)
            down = (outside == _LIST_END) | (outside == _OBJECT_END)
            levels = np.cumsum(up.astype(np.int8) - down, dtype=np.int32)
            shape.depth = max(shape.depth, depth + int(levels.max()))
            depth += int(levels[-1])
        yield shape
    if not text:
        yield shape


def _quotes(piece: np.ndarray, escaped: int) -> tuple[np.ndarray, int]:
    """Where texts begin and end, and whether the byte after the piece is escaped. `escaped`: the first one is."""
    quotes = np.flatnonzero(piece == _QUOTE)
    escapes = piece == _ESCAPE
    if not (escaped or escapes.any()):
        return quotes, 0
    last = np.maximum.accumulate(np.where(escapes, -1, np.arange(len(piece), dtype=np.int32)))  # that is no backslash
    before = np.where(quotes > 0, last[quotes - 1], -1)
    odd = (quotes - 1 - before + (escaped & (before < 0))) % 2
    run = len(piece) - 1 - int(last[-1]) + (escaped if last[-1] < 0 else 0)
    return quotes[odd == 0], run % 2

"""Whose characters a rendered prompt is made of: the template's, or a client's.

A ClientText is a string that knows this of each of its characters, and keeps knowing it through everything that a chat
template does with strings: adding, slicing, trimming, splitting, joining. It equals, hashes and orders like the plain
string, so a template decides as if there were none. What cannot be followed counts as the client's.
"""

from __future__ import annotations

import re
from abc import ABC
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, SupportsIndex

from lmkit.prompts import OURS, THEIRS

_WORD = re.compile(r"[A-Za-z][A-Za-z0-9_-]*")
_STAND_IN = re.compile("(\ufdd1[0-9]+\ufdd2)")


class Harmless(ABC):  # noqa: B024 - others register what it means
    """What prints as nobody's text. The template engine registers its undefined values."""


_HARMLESS = (bool, int, float, Harmless)


class ClientText(str):
    """`origins`: a byte per character, THEIRS or OURS; without it all characters are the client's."""

    __slots__ = ("_origins",)
    _origins: bytes

    def __new__(cls, text: str, origins: bytes | None = None) -> ClientText:
        made = super().__new__(cls, text)
        made._origins = THEIRS * len(text) if origins is None else origins
        return made

    def __str__(self) -> str:
        return self

    def __add__(self, other: Any) -> str:
        return concat((self, other)) if isinstance(other, str) else NotImplemented

    def __radd__(self, other: Any) -> str:
        return concat((other, self)) if isinstance(other, str) else NotImplemented

    def __mul__(self, times: SupportsIndex) -> str:
        return _made(str.__mul__(self, times), self._origins * times)

    __rmul__ = __mul__

    def __mod__(self, values: Any) -> str:
        return ClientText(str.__mod__(self, values))

    def __rmod__(self, other: Any) -> str:
        return formatted(other.__mod__, (self,)) if isinstance(other, str) else NotImplemented

    def __getitem__(self, key: SupportsIndex | slice) -> str:
        found = self._origins[key]
        return _made(str.__getitem__(self, key), found if isinstance(found, bytes) else bytes((found,)))

    def __iter__(self) -> Iterator[str]:
        return (self[i] for i in range(len(self)))

    def lstrip(self, chars: str | None = None, /) -> str:
        return self[len(self) - len(str.lstrip(self, chars)) :]

    def rstrip(self, chars: str | None = None, /) -> str:
        return self[: len(str.rstrip(self, chars))]

    def strip(self, chars: str | None = None, /) -> str:
        return self.lstrip(chars).rstrip(chars)

    def removeprefix(self, prefix: str, /) -> str:
        return self[len(self) - len(str.removeprefix(self, prefix)) :]

    def removesuffix(self, suffix: str, /) -> str:
        return self[: len(str.removesuffix(self, suffix))]

    def split(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        return self._cut(str.split(self, sep, maxsplit), sep)

    def rsplit(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        return self._cut(str.rsplit(self, sep, maxsplit), sep)

    def splitlines(self, keepends: bool = False) -> list[str]:
        return self._cut(str.splitlines(self, keepends), "" if keepends else None)

    def partition(self, sep: str, /) -> tuple[str, str, str]:
        first, middle, last = self._cut(list(str.partition(self, sep)), "")
        return first, middle, last

    def rpartition(self, sep: str, /) -> tuple[str, str, str]:
        first, middle, last = self._cut(list(str.rpartition(self, sep)), "")
        return first, middle, last

    def replace(self, old: str, new: str, count: SupportsIndex = -1, /) -> str:
        return joined(new, self.split(old, count)) if old else ClientText(str.replace(self, old, new, count))

    def join(self, items: Iterable[str], /) -> str:
        return joined(self, list(items))

    def _cut(self, pieces: list[str], gap: str | None) -> list[str]:
        """`pieces` of this text in order, `gap` between them; None: blanks that no piece begins with."""
        found, at = [], 0
        for piece in pieces:
            if gap is None:
                at = str.find(self, piece, at)
            found.append(self[at : at + len(piece)])
            at += len(piece) + len(gap or "")
        return found


def _followed(name: str) -> Callable[..., str]:
    """A method of strings that changes characters: their origins stay when the length does."""
    method = getattr(str, name)

    def run(self: ClientText, *args: Any, **kwargs: Any) -> str:
        text = method(self, *args, **kwargs)
        return _made(text, self._origins) if len(text) == len(self) else ClientText(text)

    run.__name__ = name
    return run


for _name in ("capitalize", "casefold", "center", "expandtabs", "ljust", "lower", "rjust", "swapcase", "title",
              "translate", "upper", "zfill"):  # fmt: skip
    setattr(ClientText, _name, _followed(_name))


def origins(text: str) -> bytes:
    return text._origins if isinstance(text, ClientText) else OURS * len(text)


def _made(text: str, origins: bytes) -> str:
    return ClientText(text, origins) if THEIRS in origins else str.__str__(text)


def concat(parts: Iterable[str]) -> str:
    parts = list(parts)
    text = "".join(parts)
    if not any(isinstance(p, ClientText) for p in parts):
        return text
    return ClientText(text, b"".join(map(origins, parts)))


def joined(glue: str, items: Iterable[str]) -> str:
    parts: list[str] = []
    for item in items:
        if parts:
            parts.append(glue)
        parts.append(item)
    return concat(parts)


def text_of(value: Any) -> str:
    """What printing `value` gives. Lists and objects are shown whole, and nobody looks whose their parts are."""
    if isinstance(value, str):
        return value
    text = str(value)
    return text if value is None or isinstance(value, _HARMLESS) else ClientText(text)


def is_theirs(value: Any) -> bool:
    """Whether a client's text is in `value`."""
    if isinstance(value, str):
        return isinstance(value, ClientText)
    if isinstance(value, Mapping):
        return any(is_theirs(k) or is_theirs(v) for k, v in value.items())
    if isinstance(value, (list, tuple, set, frozenset)):
        return any(map(is_theirs, value))
    return not (value is None or isinstance(value, _HARMLESS))  # nobody knows what is in other objects


def formatted(make: Callable[[Any], str], values: Any) -> str:
    """`make(values)`, for a format that takes a tuple or a mapping: its own characters are told from the values'.

    Stand-ins are put in place of the values. Where these do not come out whole, all is the client's.
    """
    text = make(values)
    if isinstance(text, ClientText):
        return text
    texts: list[str] = []

    def stand_in(value: Any) -> Any:
        if not isinstance(value, str) and (value is None or isinstance(value, _HARMLESS)):
            return value
        texts.append(text_of(value))
        return f"\ufdd1{len(texts) - 1}\ufdd2"

    if isinstance(values, Mapping):
        changed: Any = {key: stand_in(value) for key, value in values.items()}
    else:
        changed = tuple(map(stand_in, values))
    try:
        pieces = _STAND_IN.split(make(changed))
        traced = concat(texts[int(p[1:-1])] if i % 2 else p for i, p in enumerate(pieces))
    except (ValueError, TypeError, LookupError):
        return ClientText(text)
    return traced if traced == text else ClientText(text)


def theirs(value: Any) -> Any:
    """A JSON value with every text in it, keys included, as the client's."""
    if isinstance(value, str):
        return ClientText(value)
    if isinstance(value, Mapping):
        return {theirs(k): theirs(v) for k, v in value.items()}
    return [theirs(v) for v in value] if isinstance(value, (list, tuple)) else value


class Reads:
    """The place of the value that a template read last, like ("3", "tool_calls", "0", "id")."""

    __slots__ = ("last",)

    def __init__(self) -> None:
        self.last: tuple[str, ...] = ()


class Noted(dict[str, Any]):
    """An object of a message, which notes what is read of it."""

    __slots__ = ("_place", "_reads")

    def __init__(self, values: Mapping[str, Any], reads: Reads, place: tuple[str, ...]) -> None:
        super().__init__(values)
        self._reads, self._place = reads, place

    def __getitem__(self, key: str) -> Any:
        if isinstance(key, str):  # a template may ask with anything
            self._reads.last = (*self._place, key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        if isinstance(key, str):
            self._reads.last = (*self._place, key)
        return super().get(key, default)


def _noted(value: Any, reads: Reads, place: tuple[str, ...]) -> Any:
    """A JSON value of the client whose objects note what is read of them; but not within arguments of a call."""
    if place[-1] == "arguments":
        return theirs(value)
    if isinstance(value, Mapping):
        fields = {theirs(key): _noted(member, reads, (*place, key)) for key, member in value.items()}
        return Noted(fields, reads, place)
    if isinstance(value, (list, tuple)):
        return [_noted(member, reads, (*place, str(i))) for i, member in enumerate(value)]
    return theirs(value)


def theirs_of_request(variables: Mapping[str, Any], reads: Reads | None = None) -> dict[str, Any]:
    """Marks the values of a request as the client's; `reads` learns what a template reads of the messages.

    But a role, or a switch of the template, that is one plain word is a choice among the template's own: it may be
    part of what the template writes, as in `<|user|>`.
    """
    found = {key: _choice(value) for key, value in variables.items()}
    reads = Reads() if reads is None else reads
    found["messages"] = [
        Noted({key: _choice(value) if key == "role" else _noted(value, reads, (str(i), key))
               for key, value in message.items()}, reads, (str(i),))
        for i, message in enumerate(variables["messages"])
    ]  # fmt: skip
    return found


def _choice(value: Any) -> Any:
    return value if isinstance(value, str) and _WORD.fullmatch(value) else theirs(value)

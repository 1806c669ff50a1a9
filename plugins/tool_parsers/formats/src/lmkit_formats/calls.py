"""Call bodies: the part of a tool format between its markers. A file for each kind: its declaration and its reader.

A reader is fed text and reports calls to a CallSink. It stops at the end of each call (`state` "more", no call open),
of the body ("done"), or at the first character that does not belong to it ("bad", that character is left unread).
The sink announces a call with the first text of its arguments. `end` says that the model closed it: a reader calls it
when it has read the end of the JSON object that the arguments are, or, where it converts arguments to JSON, the end of
the call itself. What was consumed of a call that was not announced is kept by the reader's caller; an announced call
that breaks is told to `cut`.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol

from lmkit.api import ToolDef

from lmkit_formats.jsonread import JsonReader
from lmkit_formats.markers import markers, skip_blanks
from lmkit_formats.sink import CallSink
from lmkit_formats.tags import Tag

State = Literal["more", "done", "bad"]
MAX_NAME = 256  # characters of a tool's name or a key
# between "{" and the first key of a bare call
GAPS = ("", " ", "\n", "\n ", "\n  ", "\n    ", "\n\t", "\r\n", "\r\n  ")


class BodyReader(Protocol):
    state: State

    def feed(self, text: str, at: int, final: bool) -> int:
        """Where it stopped. What it leaves unread in state "more", with no call ended, is fed again with more text."""
        ...

    def cut(self) -> str:
        """The announced call breaks, or the output ends in it. Gives the rest of JSON that the model wrote away as it
        is, completes nothing, and returns what else was consumed at the end of the call: text that is content now."""
        ...


class CallBody(ABC):
    """How the calls between the markers of a tool format are written. A format may have a body of a plugin's own."""

    __slots__ = ()

    is_json = False  # of several bodies, the one that is used where "{" or "[" follows
    is_named = False  # a body begins with the name of a tool
    first = "["  # characters that a body may begin with where it comes without a marker
    is_list = False  # one body holds any number of calls
    brackets = ("[", "]")  # around the calls of a list
    comma = ", "  # between them
    opener = ""  # what all calls begin with, when that tells them from text
    wrong: re.Pattern[str] | None = None  # how a body begins that is none, as far as that tells

    @property
    def texts(self) -> tuple[str, ...]:
        """All texts that may be special tokens."""
        return ()

    def bare_texts(self, tools: Sequence[ToolDef]) -> tuple[str, ...]:
        """How a body may begin in the middle of text: with a key of a call or a tool's name, not with any bracket."""
        return tuple(self.first)

    @abstractmethod
    def reader(self, sink: CallSink, tools: Sequence[ToolDef], ends: Sequence[str], *, strict_keys: bool) -> BodyReader:
        """For one body. `ends`: the closing markers, which it leaves unread; `strict_keys`: nothing but the keys that
        are declared makes an object a call, for it stands in the middle of text."""

    @abstractmethod
    def frame(self, name: str, index: str) -> tuple[str, str]:
        """What is written before and after the arguments of a call."""

    @abstractmethod
    def write(self, arguments: Mapping[str, Any], schema: Mapping[str, Any]) -> str:
        """The arguments as the family writes them."""

    @abstractmethod
    def accept(self, tool: ToolDef) -> Tag:
        """The arguments that the tool's schema allows, as `write` writes them. Raises InvalidParam for a strict tool
        whose schema cannot be enforced."""


class ArgumentsReader:
    """A JSON object that is the arguments of a call: announced when it has begun well, then streamed."""

    def __init__(self, sink: CallSink, name: str, id: str = "") -> None:
        self._sink, self._name, self._id = sink, name, id
        self._json = JsonReader()
        self._begun = False
        self.state: State = "more"

    def feed(self, text: str, at: int) -> int:
        if not self._begun:
            at = skip_blanks(text, at)
            if at == len(text):
                return at
            if text[at] != "{":
                self.state = "bad"
                return at
            self._begun = True
            self._sink.start(self._name, self._id)
        end = self._json.feed(text, at)
        if self._json.begun and self._json.out:
            self._sink.args("".join(self._json.out))
            self._json.out.clear()
        self.state = self._json.state  # type: ignore[assignment]
        return end

    def cut(self) -> str:
        self._sink.args(self._json.leftover())
        return ""


def read_prefix(prefix: list[str], text: str, at: int, final: bool) -> tuple[int, bool]:
    """Consumes the constant texts of `prefix`, with blanks before each: (where it stopped, False if they are wrong)."""
    while prefix:
        found = markers(prefix[0]).at(text, at, final)
        if found is None:
            return at, False
        if found.marker is None:
            return at, True
        at = found.end
        prefix.pop(0)
    return at, True


def is_name(name: object) -> bool:
    """Whether this can be the name of a tool, a key or an id: printable, hence without lone surrogates."""
    return isinstance(name, str) and 0 < len(name) <= MAX_NAME and name.isprintable()

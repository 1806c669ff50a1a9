"""The scanner for one JSON call, {"name": ..., "arguments": {...}}: gives the arguments as they are written.

It follows the top-level object strictly and the value of the arguments only as far as needed to know where it ends
(strings and nesting), so that the fragments join to exactly what the model wrote. Keys may come in any order.
"""

from __future__ import annotations

import json
import re
from typing import Literal

_IN_STRING = re.compile(r'["\\]')
_IN_VALUE = re.compile(r'["{}\[\]<]')
_BLANK = " \t\r\n"
_SCALAR_END = re.compile(r"[\s,}<]")
_ARGUMENTS = ("arguments", "parameters")


class CallScanner:
    """feed(text, at) -> (where it stopped, argument fragments). `started`: the name is known, announce the call."""

    __slots__ = ("_depth", "_escaped", "_finished", "_in_string", "_key", "_kind", "_late", "_parts", "name", "started",
                 "state")  # fmt: skip

    def __init__(self) -> None:
        self.name = ""
        self.started = False
        self.state: Literal["object", "first", "key", "colon", "value", "string", "scalar", "nested", "next", "done",
                            "bad"] = "object"  # fmt: skip
        self._key: str | None = None  # None while a key is being read
        self._parts: list[str] = []  # of the key or value being read
        self._in_string = self._escaped = self._finished = False
        self._depth = 0
        self._late: str | None = None  # arguments that came before the name

    def feed(self, text: str, at: int) -> tuple[int, list[str]]:
        """Reads until the text ends or the state is "done" or "bad"."""
        fragments: list[str] = []
        while at < len(text) and self.state not in ("done", "bad"):
            if self.state == "string":
                at = self._string(text, at, fragments)
            elif self.state == "nested":
                at = self._nested(text, at, fragments)
            elif self.state == "scalar":
                at = self._scalar(text, at)
            elif text[at] in _BLANK:
                at += 1
            else:
                at = self._structure(text, at, fragments)
        return at, fragments

    def _structure(self, text: str, at: int, fragments: list[str]) -> int:
        """One character of the top-level object. A wrong one is left unread."""
        char, state = text[at], self.state
        if state == "object" and char == "{":
            self.state = "first"
        elif state in ("first", "key") and char == '"':
            self._key, self._parts, self.state = None, [], "string"
            return at
        elif state == "colon" and char == ":":
            self.state = "value"
        elif state == "value" and char not in ",}]:<":
            return self._begin_value(char, at)
        elif state == "next" and char == ",":
            self.state = "key"
        elif state in ("first", "next") and char == "}":
            self._finish(fragments)
        else:
            # once the arguments are complete the call stands; what follows is not part of it
            self.state = "done" if self._finished else "bad"
            return at
        return at + 1 if self.state != "bad" else at

    def _begin_value(self, char: str, at: int) -> int:
        self._parts = []
        self.state = "string" if char == '"' else "nested" if char in "{[" else "scalar"
        if char == "{" and self._key in _ARGUMENTS and self.name and not self.started:
            self.started = True
        elif self._key in _ARGUMENTS and char not in '{"n':
            self.state = "bad"
        self._depth, self._in_string = 0, False
        return at

    def _string(self, text: str, at: int, fragments: list[str]) -> int:
        """A key, or a value that is a string."""
        end = self._skip_string(text, at)
        self._parts.append(text[at:end])
        if self._in_string:
            return end
        try:
            value = json.loads("".join(self._parts), strict=False)
        except ValueError:
            self.state = "bad"
            return end
        if self._key is None:
            self._key, self.state = value, "colon"
            return end
        self.state = "next"
        if self._key == "name":
            if self.name or not value:
                self.state = "bad"
                return end
            self.name = value
            if self._late is not None:
                self._give(self._late, fragments)
        elif self._key in _ARGUMENTS:
            self._give(value, fragments)
        return end

    def _skip_string(self, text: str, at: int) -> int:
        """Moves past the string that begins or goes on at `at`, or to the end of the text."""
        if not self._in_string:
            self._in_string, at = True, at + 1
        while at < len(text):
            if self._escaped:
                self._escaped, at = False, at + 1
                continue
            found = _IN_STRING.search(text, at)
            if found is None:
                return len(text)
            at = found.end()
            if found.group() == '"':
                self._in_string = False
                return at
            self._escaped = True
        return at

    def _nested(self, text: str, at: int, fragments: list[str]) -> int:
        """An object or array; streamed when it is the arguments of a started call."""
        begin = at
        while at < len(text):
            if self._in_string:
                at = self._skip_string(text, at)
                continue
            found = _IN_VALUE.search(text, at)
            if found is None:
                at = len(text)
                break
            at, char = found.end(), found.group()
            if char == '"':
                at = self._skip_string(text, at - 1)
            elif char == "<":
                self.state, at = "bad", at - 1
                break
            else:
                self._depth += 1 if char in "{[" else -1
                if self._depth == 0:
                    self.state = "next"
                    break
        streamed = self.started and not self._finished and self._key in _ARGUMENTS
        if streamed:
            fragments.append(text[begin:at])
            self._finished = self.state == "next"
        else:
            self._parts.append(text[begin:at])
            if self.state == "next" and self._key in _ARGUMENTS and not self._finished:
                self._give("".join(self._parts), fragments)
            elif self.state == "next" and self._key == "name":
                self.state = "bad"
        return at

    def _scalar(self, text: str, at: int) -> int:
        found = _SCALAR_END.search(text, at)
        end = found.start() if found else len(text)
        self._parts.append(text[at:end])
        if found:
            value = "".join(self._parts)
            wrong = self._key == "name" or (self._key in _ARGUMENTS and value != "null")
            self.state = "bad" if wrong else "next"
        return end

    def _give(self, arguments: str, fragments: list[str]) -> None:
        """Complete arguments: emitted when the name is known, kept otherwise."""
        if self._finished:
            return
        if not self.name:
            self._late = arguments
            return
        self.started = self._finished = True
        fragments.append(arguments)

    def _finish(self, fragments: list[str]) -> None:
        if not self.name:
            self.state = "bad"
            return
        if not self._finished:
            self._give("{}", fragments)
        self.state = "done"

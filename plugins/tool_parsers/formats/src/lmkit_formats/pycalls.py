"""Bodies that are Python calls with literal arguments (PyCalls). Nothing is evaluated."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from lmkit.api import ToolDef

from lmkit_formats.calls import GAPS, BodyReader, CallBody, State, is_name
from lmkit_formats.markers import skip_blanks
from lmkit_formats.schemas import kinds_of, referring
from lmkit_formats.sink import CallSink
from lmkit_formats.tags import Tag, dump, either, listed, schema_of, ways

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.\-]*")
_WORD = re.compile(r"[A-Za-z0-9_.\-]*")
_PLAIN = re.compile(r"[^\"'\[\]{}(),]*")
_STOP = {q: re.compile(rf"[{q}\\]") for q in "\"'"}  # what ends a plain run inside a string
# of an argument, before its value
_HEAD = re.compile(r"\s{0,64}(?:[A-Za-z_]\w{0,255}\s{0,64}(?:=\s{0,64})?)?")
_INTEGER = re.compile(r"\s*(-?(?:0|[1-9][0-9]{0,17}))\s*")
_MAX_DEPTH = 64
_MAX_WORD = 256


@dataclass(frozen=True, slots=True)
class PyCalls(CallBody):
    """Python calls with literal arguments: [f(a=1, b="x"), g()], or with `lines` one call per line."""

    lines: bool = False

    is_list = True

    @property
    def brackets(self) -> tuple[str, str]:  # type: ignore[override]
        return ("", "") if self.lines else ("[", "]")

    @property
    def comma(self) -> str:  # type: ignore[override]
        return "\n" if self.lines else ", "

    def bare_texts(self, tools: Sequence[ToolDef]) -> tuple[str, ...]:
        return tuple(f"[{gap}{tool.name}(" for gap in GAPS for tool in tools)

    def reader(self, sink: CallSink, tools: Sequence[ToolDef], ends: Sequence[str], *, strict_keys: bool) -> BodyReader:
        return PyCallsReader(self, sink)

    def frame(self, name: str, index: str) -> tuple[str, str]:
        return f"{name}(", ")"

    def write(self, arguments: Mapping[str, Any], schema: Mapping[str, Any]) -> str:
        return ", ".join(f"{key}={_python(value)}" for key, value in arguments.items())

    def accept(self, tool: ToolDef) -> Tag:
        schema = schema_of(tool)
        found = []
        for properties, required, optional in ways(schema, schema, tool.strict):
            values = {name: _python_value(part, schema) for name, part in properties.items()}
            found.append(listed(required, optional, ", ", partial(_argument, values)))
        return either(found)


class PyCallsReader:
    """Each argument is given away when it ends, and the object is closed with the bracket of the call."""

    def __init__(self, body: PyCalls, sink: CallSink) -> None:
        self._body, self._sink = body, sink
        self.state: State = "more"
        self._place = "name" if body.lines else "begin"
        self._word = self._name = ""
        self._raw: list[str] = []  # the argument that is being read
        self._written = False
        self._begins_well = False  # the first argument does
        self._depth = 0
        self._quote = ""
        self._skip = False  # the next character is escaped

    def feed(self, text: str, at: int, final: bool) -> int:
        num_calls, was_open = self._sink.num_calls, self._sink.open
        while at < len(text) and self.state == "more":
            if self._place == "argument":
                at = self._argument(text, at)
            else:
                at = self._structure(text, at)
            if not self._sink.open and (was_open or self._sink.num_calls > num_calls):
                break  # a call ended
        return at

    def cut(self) -> str:
        return "".join(self._raw)

    def _structure(self, text: str, at: int) -> int:
        last = at + _MAX_WORD + 1 - len(self._word)
        end = _WORD.match(text, at, last).end() if self._place == "name" else at  # type: ignore[union-attr]
        if end > at:
            self._word += text[at:end]
            if len(self._word) > _MAX_WORD:
                self.state = "bad"
            return end
        if not (self._place == "name" and self._word):
            at = skip_blanks(text, at)
            if at == len(text):
                return at
        c = text[at]
        if self._place == "begin" and c == "[":
            self._place = "name"
        elif self._place == "name" and c == "(" and _NAME.fullmatch(self._word) and is_name(self._word):
            self._name, self._word, self._place = self._word, "", "argument"
            self._written = self._begins_well = False
        elif self._place == "name" and not self._word and not self._body.lines and c == "]":
            self.state = "done"
        elif self._place == "next" and c == ",":
            self._place = "name"
        elif self._place == "next" and not self._body.lines and c == "]":
            self.state = "done"
        elif self._place == "next" and self._body.lines and _NAME.match(c):
            self._place = "name"
            return at
        elif self._place == "name" and not self._word and _WORD.match(c).end():  # type: ignore[union-attr]
            return at
        elif self._body.lines and not self._word and self._place in ("next", "name") and self._sink.num_calls:
            self.state = "done"
            return at
        else:
            self.state = "bad"
            return at
        return at + 1

    def _argument(self, text: str, at: int) -> int:
        """Up to the comma or bracket that ends the argument."""
        if not self._begins_well:
            at = self._check_head(text, at)
        if self.state == "bad":
            return at
        begin = at
        while at < len(text):
            if self._skip:
                self._skip, at = False, at + 1
                continue
            if not self._quote:
                at = _PLAIN.match(text, at).end()  # type: ignore[union-attr]
            else:
                at = found.start() if (found := _STOP[self._quote].search(text, at)) else len(text)
            if at == len(text):
                break
            c = text[at]
            if self._quote:
                self._quote = "" if c == self._quote else self._quote
                self._skip = c == "\\"
            elif c in "\"'":
                self._quote = c
            elif c in "[{(":
                self._depth += 1
            elif c in "]})" and self._depth:
                self._depth -= 1
            elif c in ",)" and not self._depth:
                return self._end_argument(text[begin:at], at, c)
            elif c != ",":
                self.state = "bad"
                break
            at += 1
        self._raw.append(text[begin:at])
        return at

    def _check_head(self, text: str, at: int) -> int:
        """Whether the first argument begins well. Returns where it is wrong, or else `at`."""
        begun = "".join(self._raw)
        head = _HEAD.match(begun + text[at : at + 2 * _MAX_WORD])
        assert head is not None
        stop = at + head.end() - len(begun)
        c = text[stop : stop + 1]
        has_value = c.isalnum() or bool(c and c in "-+.\"'[{(")
        self._begins_well = head.group().rstrip().endswith("=") and has_value
        if c and not self._begins_well and not (c == ")" and not head.group().strip()):
            self.state = "bad"
            self._raw.append(text[at:stop])
            return stop
        return at

    def _end_argument(self, rest: str, at: int, c: str) -> int:
        self._raw.append(rest)
        argument = "".join(self._raw).strip()
        if argument or c == ",":
            key, equals, value = argument.partition("=")
            key = key.strip()
            try:
                written = literal(value) if equals and is_name(key) else None
            except (ValueError, OverflowError):
                written = None
            if written is None:
                self.state = "bad"
                return at
            if not self._written:
                self._sink.start(self._name)
            self._sink.args(f"{', ' if self._written else '{'}{json.dumps(key)}: {written}")
            self._written = True
        self._raw.clear()
        if c == ")":
            if not self._written:
                self._sink.start(self._name)
            self._sink.end("}" if self._written else "{}")
            self._place = "next"
        return at + 1


_TOKEN = re.compile(
    r"""\s*(?:(?P<number>[-+]?(?:[0-9][0-9_]{0,400}(?:\.[0-9]{0,400})?|\.[0-9]{1,400})(?:[eE][+-]?[0-9]{1,9})?(?![\w.]))
    |(?P<word>[A-Za-z]+)|(?P<quote>["'])|(?P<mark>[\[\]{}(),:]))""",
    re.VERBOSE,
)
_WORDS = {
    "True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null",
}  # fmt: skip
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v", "0": "\0", "\n": ""}
_CODES = {"x": 2, "u": 4, "U": 8}


def literal(text: str) -> str:
    """A Python literal (numbers, strings, lists, tuples, dicts, True, None; JSON's words too) as JSON text.

    Raises ValueError for anything else.
    """
    if plain := _INTEGER.fullmatch(text):
        return plain[1]
    reader = _Literal(text)
    written = reader.value(0)
    if text[reader.at :].strip():
        raise ValueError("more than one value")
    return written


class _Literal:
    def __init__(self, text: str) -> None:
        self.text, self.at = text, 0

    def value(self, depth: int) -> str:
        kind, token = self._next()
        if kind == "number":
            return _number(token)
        if kind == "word" and token in _WORDS:
            return _WORDS[token]
        if kind == "quote":
            return json.dumps(self._strings(token), ensure_ascii=False)
        if kind == "mark" and token in "[(" and depth < _MAX_DEPTH:
            return "[" + ", ".join(self._items("])"["[(".index(token)], depth)) + "]"
        if kind == "mark" and token == "{" and depth < _MAX_DEPTH:
            return "{" + ", ".join(self._members(depth)) + "}"
        raise ValueError(f"no literal: {token!r}")

    def _next(self) -> tuple[str, str]:
        match = _TOKEN.match(self.text, self.at)
        if match is None or match.lastgroup is None:
            raise ValueError("no literal")
        self.at = match.end()
        return match.lastgroup, match.group(match.lastgroup)

    def _peek(self) -> str:
        match = _TOKEN.match(self.text, self.at)
        return match.group().strip() if match else ""

    def _items(self, close: str, depth: int) -> list[str]:
        items: list[str] = []
        while self._peek() != close:
            items.append(self.value(depth + 1))
            self._separator(close)
        self._next()
        return items

    def _members(self, depth: int) -> list[str]:
        members: list[str] = []
        while self._peek() != "}":
            key = self.value(_MAX_DEPTH)
            if self._next()[1] != ":":
                raise ValueError("a dict without ':'")
            name = key if key.startswith('"') else json.dumps(key)
            members.append(f"{name}: {self.value(depth + 1)}")
            self._separator("}")
        self._next()
        return members

    def _separator(self, close: str) -> None:
        if self._peek() != close and self._next()[1] != ",":
            raise ValueError("items without ','")

    def _strings(self, quote: str) -> str:
        """A string, and those that follow it directly."""
        parts = [self._string(quote)]
        while self._peek() in ('"', "'"):
            parts.append(self._string(self._next()[1]))
        joined = "".join(parts)
        joined.encode()  # lone surrogates cannot be sent; UnicodeEncodeError is a ValueError
        return joined

    def _string(self, quote: str) -> str:
        parts: list[str] = []
        text, at = self.text, self.at
        while True:
            found = _STOP[quote].search(text, at)
            if found is None:
                raise ValueError("a string without end")
            end = found.start()
            parts.append(text[at:end])
            if text[end] == quote:
                self.at = end + 1
                return "".join(parts)
            c = text[end + 1 : end + 2]
            at = end + 2
            if size := _CODES.get(c):
                parts.append(chr(int(text[at : at + size], 16)))
                at += size
            else:
                parts.append(_ESCAPES.get(c, c if c in "\\'\"" else "\\" + c))


def _number(token: str) -> str:
    token = token.replace("_", "")
    if re.fullmatch(r"[-+]?[0-9]+", token):
        return str(int(token))
    value = float(token)
    if value in (float("inf"), float("-inf")):
        raise ValueError("a number out of range")
    return repr(value)


def _argument(values: Mapping[str, Tag], name: str) -> tuple[str, Tag]:
    return f"{name}=", values[name]


def _python_value(schema: object, root: Mapping[str, Any]) -> Tag:
    kinds = kinds_of(schema, root)
    words = {"boolean": r"True|False", "null": "None"}
    if kinds and kinds <= words.keys():
        return {"type": "regex", "pattern": "|".join(words[k] for k in sorted(kinds))}
    rest = {"type": sorted(kinds)} if kinds else {}
    return {"type": "json_schema", "json_schema": {**referring(schema, root), **rest}}


def _python(value: object) -> str:
    """A JSON value as a Python literal."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{dump(k)}: {_python(v)}" for k, v in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(_python, value)) + "]"
    return dump(value) if isinstance(value, str) else repr(value)

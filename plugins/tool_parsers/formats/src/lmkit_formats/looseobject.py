"""Bodies that are a name and an object with bare keys and marked strings (LooseObject)."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from lmkit.api import InvalidParam, ToolDef

from lmkit_formats.calls import MAX_NAME, BodyReader, CallBody, State, is_name, read_prefix
from lmkit_formats.markers import markers, skip_blanks
from lmkit_formats.params import typed
from lmkit_formats.schemas import ANY, followed, kinds_of, referring
from lmkit_formats.sink import CallSink
from lmkit_formats.tags import Tag, dump, either, listed, plain, schema_of, tag_of, ways

_MAX_DEPTH = 128
_MAX_SCHEMA = 16  # of objects in a schema
_MAX_SCALAR = 1000  # characters of a value that is not marked as a string
_NAME_END = re.compile(r"\{")
_KEY_END = re.compile(r"[:,{}\[\]]")
_SCALAR_END = re.compile(r"[,}\]<]")


@dataclass(frozen=True, slots=True)
class LooseObject(CallBody):
    """The name and an object with bare keys: f{city:<q>Paris<q>,days:[1,2]}. What is not marked as a string is JSON."""

    quotes: tuple[str, ...]  # stand before and after a string
    prefix: tuple[str, ...] = ()  # constant texts before the name

    is_named = True

    @property
    def texts(self) -> tuple[str, ...]:
        return (*self.quotes, *self.prefix)

    def reader(self, sink: CallSink, tools: Sequence[ToolDef], ends: Sequence[str], *, strict_keys: bool) -> BodyReader:
        return LooseObjectReader(self, sink)

    def frame(self, name: str, index: str) -> tuple[str, str]:
        return "".join(self.prefix) + name + "{", "}"

    def write(self, arguments: Mapping[str, Any], schema: Mapping[str, Any]) -> str:
        return _loose(self, arguments)[1:-1]

    def accept(self, tool: ToolDef) -> Tag:
        schema = schema_of(tool)
        return _loose_members(self, schema, schema, tool.strict)


class LooseObjectReader:
    """The arguments are written as JSON as they come, and closed with the bracket of the call.

    A value that is neither marked as a string nor JSON may be a string whose first mark is missing, and so no more than
    its beginning. From there on arguments are held back until the call is closed.
    """

    def __init__(self, body: LooseObject, sink: CallSink) -> None:
        self._sink = sink
        self.state: State = "more"
        self._prefix = list(body.prefix)
        self._quote_texts, self._quotes = body.quotes, markers(*body.quotes)
        self._step = self._in_name
        self._parts: list[str] = []  # of the name, key or scalar that is being read
        self._num_parts = 0
        self._head = ""  # goes before the next value: a comma, a key
        self._closers: list[str] = []
        self._is_doubtful = False  # a value was neither marked nor JSON
        self._late: list[str] = []  # arguments that are held back since
        self._raw: list[str] = []  # what was consumed since something was given away
        self._gave = False

    def feed(self, text: str, at: int, final: bool) -> int:
        at, good = read_prefix(self._prefix, text, at, final)
        if not good:
            self.state = "bad"
        if self._prefix:
            return at
        while at < len(text) and self.state == "more":
            step, began, self._gave = self._step, at, False
            at = step(text, at, final)
            if self._gave:
                self._raw.clear()
            else:
                self._raw.append(text[began:at])
            if at == began and self._step == step:
                break  # undecided
        return at

    def cut(self) -> str:
        return "".join(self._raw)

    # Each step reads `text` from `at` and returns where the next step goes on.

    def _in_name(self, text: str, at: int, final: bool) -> int:
        end, mark = self._collect(_NAME_END, text, at, MAX_NAME)
        if not mark:
            return end
        self._name = self._take()
        if not is_name(self._name):
            self.state = "bad"
            return end
        self._step = self._before_key
        return end + 1

    def _before_key(self, text: str, at: int, final: bool) -> int:
        """The first key of an object, or its end."""
        at = skip_blanks(text, at)
        if at == len(text):
            return at
        if not self._closers:
            self._sink.start(self._name)
            self._head = "{"
            self._closers.append("}")
        if text[at] == "}":
            return self._close(at)
        self._step = self._in_key
        return at

    def _in_key(self, text: str, at: int, final: bool) -> int:
        end, mark = self._collect(_KEY_END, text, at, MAX_NAME)
        if not mark:
            return end
        key = self._take()
        if not key and mark == "}":  # after a comma too many
            return self._close(end)
        for quote in self._quote_texts:
            key = key.removeprefix(quote).removesuffix(quote)
        if mark != ":" or not is_name(key):
            self.state = "bad"
            return end
        self._head += f"{json.dumps(key, ensure_ascii=False)}: "
        self._step = self._before_value
        return end + 1

    def _before_value(self, text: str, at: int, final: bool) -> int:
        found = self._quotes.at(text, at, final)
        if found is not None and found.marker is None:
            return at
        if found is not None:
            self._give('"')
            self._step = self._in_value
            return found.end
        at = skip_blanks(text, at)
        if at == len(text):
            return at
        c = text[at]
        if c == "]" and self._closers[-1] == "]":
            return self._close(at)
        if c not in "{[":
            self._step = self._in_scalar
            return at
        if len(self._closers) == _MAX_DEPTH:
            self.state = "bad"
            return at
        self._give(c)
        self._closers.append("}" if c == "{" else "]")
        self._step = self._before_key if c == "{" else self._before_value
        return at + 1

    def _in_value(self, text: str, at: int, final: bool) -> int:
        """Inside a string."""
        begin, end, marker = self._quotes.find(text, at, final)
        if begin > at:
            self._give(json.dumps(text[at:begin], ensure_ascii=False)[1:-1])
        if marker is None:
            return begin
        self._give('"')
        self._step = self._after_value
        return end

    def _in_scalar(self, text: str, at: int, final: bool) -> int:
        end, mark = self._collect(_SCALAR_END, text, at, _MAX_SCALAR)
        if mark:
            scalar = self._take()
            written = typed(scalar, ANY)
            self._is_doubtful = self._is_doubtful or written == json.dumps(scalar, ensure_ascii=False)
            self._give(written)
            self._step = self._after_value
        return end

    def _after_value(self, text: str, at: int, final: bool) -> int:
        at = skip_blanks(text, at)
        if at == len(text):
            return at
        if text[at] == self._closers[-1]:
            return self._close(at)
        if text[at] != ",":
            self.state = "bad"
            return at
        self._head = ", "
        self._step = self._in_key if self._closers[-1] == "}" else self._before_value
        return at + 1

    def _close(self, at: int) -> int:
        self._head = "{" if self._head == "{" else ""  # else a comma too many
        self._give(self._closers.pop())
        self._step = self._after_value
        if not self._closers:
            self._sink.end("".join(self._late))
            self.state = "done"
        return at + 1

    def _give(self, text: str) -> None:
        text, self._head = self._head + text, ""
        if self._is_doubtful:
            self._late.append(text)
        else:
            self._sink.args(text)
            self._gave = True

    def _collect(self, ends: re.Pattern[str], text: str, at: int, limit: int) -> tuple[int, str]:
        """Reads to one of `ends`: (where it stopped, the end or ""). More than `limit` characters are "bad"."""
        last = at + limit - self._num_parts
        found = ends.search(text, at, last + 1)
        stop = found.start() if found else min(len(text), last)
        self._parts.append(text[at:stop])
        self._num_parts += stop - at
        if found is None and stop < len(text):  # at a place that does not depend on how the text is split
            self.state = "bad"
        return stop, found.group() if found else ""

    def _take(self) -> str:
        text = "".join(self._parts).strip()
        self._parts, self._num_parts = [], 0
        return text


def _loose_members(
    body: LooseObject, schema: Mapping[str, Any], root: Mapping[str, Any], strict: bool, depth: int = 0
) -> Tag:
    """Raises InvalidParam for an object that does not say what is in it."""
    found = []
    for properties, required, optional in ways(schema, root, strict):
        if (not properties and depth) or depth > _MAX_SCHEMA:
            expected = "objects with properties, not nested too deep, for this tool format"
            raise InvalidParam("tools", dict(schema), expected)
        values = {name: _loose_value(body, part, root, strict, depth + 1) for name, part in properties.items()}
        found.append(listed(required, optional, ",", partial(_member, values)))
    return either(found)


def _member(values: Mapping[str, Tag], name: str) -> tuple[str, Tag]:
    return f"{name}:", values[name]


def _loose_value(body: LooseObject, schema: object, root: Mapping[str, Any], strict: bool, depth: int) -> Tag:
    kinds = kinds_of(schema, root)
    known = followed(schema, root)
    quote = body.quotes[0]
    options: list[Tag] = []
    if kinds is None or "string" in kinds:
        options += [tag_of(quote, content, quote) for content in plain(schema, root, strict)]
    if kinds and "array" in kinds:
        item = tag_of("", _loose_value(body, known.get("items"), root, strict, depth + 1), "")
        options.append(tag_of("[", {"type": "tags_with_separator", "tags": [item], "separator": ","}, "]"))
    if kinds and "object" in kinds:
        options.append(tag_of("{", _loose_members(body, known, root, strict, depth), "}"))
    scalars = {"integer", "number", "boolean", "null"} & (kinds or {"number", "boolean", "null"})
    if scalars:
        rest = {**referring(schema, root), "type": sorted(scalars)}
        options.append({"type": "json_schema", "json_schema": rest})
    return options[0] if len(options) == 1 else {"type": "or", "elements": options}


def _loose(body: LooseObject, value: object) -> str:
    """A JSON value with bare keys and marked strings."""
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{k}:{_loose(body, v)}" for k, v in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ",".join(_loose(body, v) for v in value) + "]"
    return f"{body.quotes[0]}{value}{body.quotes[0]}" if isinstance(value, str) else dump(value)

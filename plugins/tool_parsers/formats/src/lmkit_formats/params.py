"""Bodies with one element per argument (Params), typed by the tool's JSON schema."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from lmkit.api import ToolDef

from lmkit_formats.calls import MAX_NAME, BodyReader, CallBody, State, is_name, read_prefix
from lmkit_formats.jsonread import JsonReader
from lmkit_formats.markers import Found, markers
from lmkit_formats.pycalls import literal
from lmkit_formats.schemas import ANY, ValueType, allows, argument_type, kind_of, kinds_of, referring, same
from lmkit_formats.sink import CallSink
from lmkit_formats.tags import Tag, dump, either, maybe, plain, schema_of, sequence, tag_of, ways


@dataclass(frozen=True, slots=True)
class Params(CallBody):
    """The name, then one element per argument: <parameter=city>Paris</parameter>, typed by the tool's JSON schema."""

    name_ends: tuple[str, ...]  # what ends the name; a text that is also `open` or `foot` is not consumed
    open: str  # before a key
    key_ends: tuple[str, ...]  # after a key
    close: str  # after a value
    foot: str = ""  # after the last value, when the format has one besides the close of the call
    prefix: tuple[str, ...] = ()  # constant texts before the name
    value_open: str = ""  # before a value, when a key is closed of its own
    typed: tuple[str, ...] = ()  # "string" or "json" for each of `key_ends`, when the element says its type
    untyped: Literal["string", "json"] = "string"  # how a value is read that the schema says nothing of
    strip: Literal["", "newline", "blank"] = ""  # taken off both ends of a value; "newline": one at each end
    verbatim: bool = False  # all values are strings
    gap: str = ""  # blanks that the family writes around elements
    block: bool = False  # a value with a newline at both ends stands on lines of its own: they are not part of it
    raw: tuple[str, ...] = ()  # what may stand before and after a part of a value in which markers are text
    wrappers: tuple[str, ...] = ()  # keys that hold all arguments as one object, when the tool has none of that name

    is_named = True

    @property
    def texts(self) -> tuple[str, ...]:
        marks = (self.open, *self.key_ends, self.close, self.foot, self.value_open)
        return (*self.name_ends, *marks, *self.prefix)

    def reader(self, sink: CallSink, tools: Sequence[ToolDef], ends: Sequence[str], *, strict_keys: bool) -> BodyReader:
        return ParamsReader(self, sink, tools, ends)

    def frame(self, name: str, index: str) -> tuple[str, str]:
        end = self.name_ends[0] if self.name_ends[0] not in (self.open, self.foot) else ""
        return "".join(self.prefix) + name + end + self.gap, self.foot

    def write(self, arguments: Mapping[str, Any], schema: Mapping[str, Any]) -> str:
        elements = []
        for key, value in arguments.items():
            as_text = isinstance(value, str)
            begin, end = _element(self, key, as_text)
            elements.append(begin + (value if as_text else dump(value)) + end + self.gap)
        return "".join(elements)

    def accept(self, tool: ToolDef) -> Tag:
        schema = schema_of(tool)
        found = []
        for properties, required, optional in ways(schema, schema, tool.strict):
            elements = [_parameter(self, key, properties[key], schema, tool.strict) for key in required]
            elements += [maybe(_parameter(self, key, properties[key], schema, tool.strict)) for key in optional]
            found.append(sequence(*elements))
        return either(found)


class ParamsReader:
    """Each argument is given away when its element ends, and the object is closed when the call's own end was read.

    A value whose end is missing may be no more than the beginning of one that has a marker in it. What follows it is
    held back, and the call stands only if nothing but its close comes behind it.
    """

    def __init__(self, body: Params, sink: CallSink, tools: Sequence[ToolDef], ends: Sequence[str]) -> None:
        """`ends`: the closing markers of the call, which the reader leaves unread."""
        self._body, self._sink, self._ends = body, sink, tuple(ends)
        self.state: State = "more"
        self._tools = tools
        self._root: Mapping[str, Any] = {}
        self._prefix = list(body.prefix)
        self._step = self._in_name
        self._parts: list[str] = []  # of the name, key or value that is being read
        self._num_parts = 0
        self._raw: list[str] = []  # the element that is being read, as written
        self._key = ""
        self._kind = ""  # "string" or "json", where the element says so
        self._written = False  # an argument was given away
        self._doubtful = False  # a value had no end of its own
        self._held: list[str] = []  # arguments that are held back since
        self._inner = ""  # the value of an argument that may hold all of them: an object
        self._outer = ""  # the same argument as it was written
        self._num_raw_parts = 0  # of the value: those up to the end of its last raw text
        stops = (body.open, body.foot, *ends)
        self._name_ends = markers(*body.name_ends, *ends)
        self._has_end = body.open not in body.name_ends  # a name has an end of its own, also without arguments
        self._kept = frozenset(stops)  # ends of names and values that are left unread
        self._next = markers(*stops)
        # a value whose end is missing goes on to the next element, or to the end of the call
        self._value_ends = markers(body.close, *body.raw[:1], *(() if body.value_open else stops))

    def feed(self, text: str, at: int, final: bool) -> int:
        at, good = read_prefix(self._prefix, text, at, final)
        if not good:
            self.state = "bad"
        if self._prefix:
            return at
        while at < len(text) and self.state == "more":
            step, began = self._step, at
            at = step(text, at, final)
            if self._doubtful or self._step != self._between:
                self._raw.append(text[began:at])
            if at == began and self._step == step:
                break  # undecided
        return at

    def cut(self) -> str:
        return "".join(self._raw)

    def _in_name(self, text: str, at: int, final: bool) -> int:
        found = self._collect(self._name_ends.find(text, at, final, MAX_NAME), text, at, MAX_NAME)
        if found.marker is None:
            return found.begin
        name = self._take()
        is_cut = found.marker in self._ends and self._has_end
        if is_cut or not is_name(name):
            self.state = "bad"
            return found.begin
        tool = next((t for t in self._tools if t.name == name), None)
        self._root = tool.parameters if tool else {}
        self._sink.start(name)
        self._step = self._between
        return found.begin if found.marker in self._kept else found.end

    def _between(self, text: str, at: int, final: bool) -> int:
        found = self._next.at(text, at, final)
        if found is None:
            self.state = "bad"
            return at
        if found.marker is None:
            return at
        if found.marker == self._body.open:
            if self._inner:
                self._give_json(self._outer)
            if not self._doubtful:
                self._raw.clear()
            self._step = self._in_key
            return found.end
        if self._doubtful:
            self._step = self._after_end
            return found.end
        self._finish()
        return found.end if found.marker == self._body.foot else found.begin

    def _after_end(self, text: str, at: int, final: bool) -> int:
        """Behind the first closing marker of a doubtful call: the next one, or that marker was text of a value."""
        found = markers(*self._ends).at(text, at, final)
        if found is None:
            self.state = "bad"
        elif found.marker is not None:
            self._finish()
        return at

    def _finish(self) -> None:
        self._sink.args("".join(self._held))
        self._sink.end(self._inner or ("}" if self._written else "{}"))
        self.state = "done"

    def _in_key(self, text: str, at: int, final: bool) -> int:
        body = self._body
        found = self._collect(markers(*body.key_ends).find(text, at, final, MAX_NAME), text, at, MAX_NAME)
        if found.marker is None:
            return found.begin
        self._key = self._take()
        if not is_name(self._key):
            self.state = "bad"
        self._kind = body.typed[body.key_ends.index(found.marker)] if body.typed else ""
        self._step = self._before_value if body.value_open else self._in_value
        return found.end

    def _before_value(self, text: str, at: int, final: bool) -> int:
        found = markers(self._body.value_open).at(text, at, final)
        if found is None:
            self.state = "bad"
            return at
        if found.marker is None:
            return at
        self._step = self._in_value
        return found.end

    def _in_value(self, text: str, at: int, final: bool) -> int:
        found = self._collect(self._value_ends.find(text, at, final), text, at, None)
        if found.marker is None:
            return found.begin
        if found.marker in self._body.raw:
            if not self._num_raw_parts and not "".join(self._parts).strip():
                self._parts.clear()
            self._step = self._in_raw
            return found.end
        if self._num_raw_parts and not "".join(self._parts[self._num_raw_parts :]).strip():
            del self._parts[self._num_raw_parts :]
        if found.marker in self._kept and found.marker != self._body.close:
            self._doubtful = True
        self._give("".join(self._parts))
        if not self._doubtful:
            self._raw.clear()
        self._parts.clear()
        self._num_raw_parts = 0
        self._step = self._between
        return found.begin if found.marker in self._kept else found.end

    def _in_raw(self, text: str, at: int, final: bool) -> int:
        """A part of a value in which markers are text."""
        begin, end, marker = markers(self._body.raw[1]).find(text, at, final)
        self._parts.append(text[at:begin])
        if marker is None:
            return begin
        self._num_raw_parts = len(self._parts)
        self._step = self._in_value
        return end

    def _collect(self, found: Found, text: str, at: int, limit: int | None) -> Found:
        last = at + limit - self._num_parts if limit is not None else found.begin
        if found.begin > last:  # at a place that does not depend on how the text is split
            self.state = "bad"
            return Found(last, last, None)
        self._parts.append(text[at : found.begin])
        self._num_parts += found.begin - at
        return found

    def _take(self) -> str:
        text = "".join(self._parts).strip()
        self._parts.clear()
        self._num_parts = 0
        return text

    def _give(self, value: str) -> None:
        """One argument. A key may come again: readers of JSON take the last value."""
        self._num_parts = 0
        written = self._json(value)
        member = f"{json.dumps(self._key, ensure_ascii=False)}: {written}"
        self._inner = "" if self._written else self._unwrapped(written)
        if self._inner:
            self._outer = member  # until it is known that it is the only one
        else:
            self._give_json(member)

    def _give_json(self, member: str) -> None:
        member = f"{', ' if self._written else '{'}{member}"
        if self._doubtful:
            self._held.append(member)
        else:
            self._sink.args(member)
        self._written, self._inner = True, ""

    def _unwrapped(self, value: str) -> str:
        """The object in an argument that the tool does not have, and that models put all others into; or ""."""
        if self._key not in self._body.wrappers or not self._root or argument_type(self._root, self._key):
            return ""
        if value.startswith('"'):
            value = json.loads(value).strip()
        reader = JsonReader()
        if not value.startswith("{") or reader.feed(value, 0) < len(value) or reader.state != "done":
            return ""
        return "".join(reader.out)

    def _json(self, value: str) -> str:
        body = self._body
        if body.strip == "newline":
            value = value.removeprefix("\n").removesuffix("\n")
        elif body.strip == "blank":
            value = value.strip()
        elif body.block and len(value) > 1 and value[0] == value[-1] == "\n":
            value = value[1:-1]
        if body.verbatim or self._kind == "string":
            return json.dumps(value, ensure_ascii=False)
        said = ANY if self._kind == "json" else argument_type(self._root, self._key) or ANY
        if said.kinds is None and self._kind != "json" and body.untyped == "string":
            return json.dumps(value, ensure_ascii=False)
        return typed(value, said)


def typed(value: str, said: ValueType) -> str:
    """The value as JSON text: as JSON where it is JSON of an allowed kind, as a string otherwise.

    Where the schema lists its values, it is one of them if it can be: "7" is a string where 7 is not listed.
    """
    kinds = said.kinds
    as_string = json.dumps(value, ensure_ascii=False)
    if said.values is not None and _is_string_of(value, said.values):
        return as_string
    if kinds == {"string"}:
        return as_string
    text = value.strip()
    if text in ("True", "False", "None"):
        text = {"True": "true", "False": "false", "None": "null"}[text]
    elif kinds and "null" in kinds and "string" not in kinds and text.lower() in ("nil", "none", "null"):
        text = "null"
    reader = JsonReader()
    end = reader.feed(text, 0)
    reader.end()
    if text and reader.state == "done" and end == len(text):
        written = "".join(reader.out)
    elif kinds and kinds & {"array", "object"} and text.startswith(("[", "{", "(")):
        try:
            written = literal(text)  # templates show lists and dicts of the history as Python does
        except ValueError:
            return as_string
    else:
        return as_string
    if kinds is None:
        return written
    kind = kind_of(json.loads(written)) if written[0] not in "{[" else {"{": "object", "[": "array"}[written[0]]
    allowed = allows(kinds, kind)
    if kind == "string" and "string" in kinds:
        return as_string  # the quotes are part of it
    if kind == "number" and "integer" in kinds and float(written).is_integer():
        return str(int(float(written)))
    return written if allowed else as_string


def _is_string_of(text: str, values: Sequence[Any]) -> bool:
    """Whether `text` is one of the values as a string, and none of them as JSON."""
    if text not in values:
        return False
    try:
        parsed = json.loads(text)
    except (ValueError, RecursionError):
        return True
    return isinstance(parsed, str) or not any(same(parsed, value) for value in values)


def _element(body: Params, key: str, as_text: bool) -> tuple[str, str]:
    kind = "string" if as_text else "json"
    key_end = body.key_ends[body.typed.index(kind) if kind in body.typed else 0]
    blank = "\n" if body.strip == "newline" else ""
    return f"{body.open}{key}{key_end}{body.value_open}{blank}", blank + body.close


def _parameter(body: Params, key: str, schema: object, root: Mapping[str, Any], strict: bool) -> Tag:
    kinds = kinds_of(schema, root)
    only_text = body.verbatim or kinds == {"string"} or (kinds is None and body.untyped == "string")
    options = []
    if only_text or (kinds and "string" in kinds):
        begin, end = _element(body, key, as_text=True)
        options += [tag_of(begin, content, end + body.gap) for content in plain(schema, root, strict)]
    if not only_text:
        begin, end = _element(body, key, as_text=False)
        rest = {"type": sorted(kinds - {"string"})} if kinds else {}
        content = {"type": "json_schema", "json_schema": {**referring(schema, root), **rest}}
        options.append(tag_of(begin, content, end + body.gap))
    return options[0] if len(options) == 1 else {"type": "or", "elements": options}

"""JsonCalls: objects that name the tool in one field and its arguments in another, alone or in a list."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

from lmkit.api import ParseWarning, ToolDef

from lmkit_formats.calls import GAPS, ArgumentsReader, BodyReader, CallBody, State, is_name
from lmkit_formats.jsonread import JsonReader
from lmkit_formats.markers import BLANKS, skip_blanks
from lmkit_formats.sink import CallSink
from lmkit_formats.tags import Tag, dump, schema_of

_PLAIN_KEY = re.compile(r'"([A-Za-z_]{1,64})"')
# the usual way to write these: one match instead of a step for each part
_NEXT_KEY = re.compile(r'[{,][ \t\r\n]*"([A-Za-z_]{1,64})"[ \t\r\n]*:')
_PLAIN_TEXT = re.compile(r'"([^"\\\x00-\x1f]{0,256})"')
_JSON_BEGINS = '-0123456789tfn"{['
_HARMLESS = ("id", "type")  # fields of a call that say nothing more
_B = r"[ \t\r\n]*+"
# what follows a bracket is wrong, or a name is no text
_NO_OBJECT, _NO_LIST = rf'\{{{_B}(?=[^"}} \t\r\n])', rf"\[{_B}(?=[^{{\] \t\r\n])"
_NO_NAME = rf'\{{{_B}"(?:NAME)"{_B}:{_B}(?=[^" \t\r\n])'


@dataclass(frozen=True, slots=True)
class JsonCalls(CallBody):
    """{"name": ..., "arguments": {...}}, keys in any order."""

    name: tuple[str, ...] = ("name",)
    arguments: tuple[str, ...] = ("arguments", "parameters")
    id: tuple[str, ...] = ()  # keys whose value is the id of the call
    many: Literal["one", "list", "any"] = "one"  # an object; an array of objects; either
    keyed: bool = False  # {NAME: {...}} instead of named fields
    required: bool = False  # a call without arguments is none

    is_json = True

    @property
    def first(self) -> str:  # type: ignore[override]
        return {"one": "{", "list": "[", "any": "{["}[self.many]

    @property
    def is_list(self) -> bool:  # type: ignore[override]
        return self.many != "one"

    @property
    def opener(self) -> str:  # type: ignore[override]
        return self.frame("", "0")[0].split('""')[0] + '"'

    @property
    def wrong(self) -> re.Pattern[str]:  # type: ignore[override]
        return _no_call(self)

    def bare_texts(self, tools: Sequence[ToolDef]) -> tuple[str, ...]:
        if self.keyed:
            return tuple(self.first)
        brackets = {"one": ("{",), "list": ("[{",), "any": ("{", "[{")}[self.many]
        keys = (*self.name, *self.arguments, *self.id, "type")
        return tuple(f'{b}{gap}"{key}"' for b in brackets for gap in GAPS for key in keys)

    def reader(self, sink: CallSink, tools: Sequence[ToolDef], ends: Sequence[str], *, strict_keys: bool) -> BodyReader:
        return JsonCallReader(self, sink, strict_keys=strict_keys)

    def frame(self, name: str, index: str) -> tuple[str, str]:
        if self.keyed:
            return f"{{{dump(name)}: ", "}"
        id = f'"{self.id[0]}": "{index}", ' if self.id else ""
        return f'{{{id}"{self.name[0]}": {dump(name)}, "{self.arguments[0]}": ', "}"

    def write(self, arguments: Mapping[str, Any], schema: Mapping[str, Any]) -> str:
        return dump(arguments)

    def accept(self, tool: ToolDef) -> Tag:
        return {"type": "json_schema", "json_schema": schema_of(tool)}


@lru_cache(maxsize=256)
def _no_call(body: JsonCalls) -> re.Pattern[str]:
    """How a body begins that is wrong from its start, up to the place where a reader would find that out."""
    first = body.first
    name = _NO_NAME.replace("NAME", "|".join(map(re.escape, body.name)))
    wrong = [_NO_OBJECT if "{" in first else "", _NO_LIST if "[" in first else ""]
    return re.compile("|".join(filter(None, [*wrong, name if "{" in first and not body.keyed else ""])))


class JsonCallReader:
    """JsonCalls: one object, or an array of them. Keys may come in any order; a missing outer end is forgiven."""

    __slots__ = (
        "_arguments", "_body", "_early", "_extra", "_finished", "_id", "_in_list", "_key", "_name", "_place", "_sink",
        "_strict_keys", "_value", "state",
    )  # fmt: skip

    def __init__(self, body: JsonCalls, sink: CallSink, *, strict_keys: bool = False) -> None:
        self._body, self._sink = body, sink
        self._strict_keys = strict_keys
        self.state: State = "more"
        self._in_list = False
        self._key = ""
        self._place: Literal["begin", "element", "next", "first", "key", "colon", "value", "member"] = "begin"
        self._value: JsonReader | None = None
        self._arguments: ArgumentsReader | None = None
        self._reset()

    def _reset(self) -> None:
        self._name = self._id = ""
        self._early: str | None = None  # arguments that came before the name
        self._finished = False  # the arguments of this call are complete
        self._extra: list[str] = []  # fields that no call has, as written

    def feed(self, text: str, at: int, final: bool) -> int:
        num_calls, was_open = self._sink.num_calls, self._sink.open
        while at < len(text) and self.state == "more":
            if self._arguments is not None:
                at = self._feed_arguments(text, at)
            elif self._value is not None:
                at = self._feed_value(text, at)
            else:
                if text[at] in BLANKS:
                    at = skip_blanks(text, at)
                if at < len(text):
                    at = self._structure(text[at], text, at)
            if not self._sink.open and (was_open or self._sink.num_calls > num_calls):
                break  # a call ended
        return at

    def cut(self) -> str:
        self._warn()
        return self._arguments.cut() if self._arguments else ""

    def _structure(self, c: str, text: str, at: int) -> int:
        """One character of the array or of the outer object, and where the next one is. A wrong one is left unread."""
        body = self._body
        match self._place:
            case "begin" if c == "[" and body.many != "one":
                self._in_list, self._place = True, "element"
            case "begin" if c == "{" and body.many != "list":
                return self._open_object(text, at)
            case "element" if c == "{":
                return self._open_object(text, at)
            case "element" | "next" if c == "]":
                self.state = "done"
            case "next" if c == ",":
                self._place = "element"
            case "first" | "key" if c == '"':
                return self._begin_key(text, at)
            case "colon" if c == ":":
                self._place = "value"
            case "value":
                return self._begin_value(c, text, at)
            case "member" if c == "," and not body.keyed:
                self._place = "key"
                return self._next_key(text, at)
            case "member" if c == "}":
                return self._end_object(at)
            case "member" if self._finished:
                self.state = "done"  # the call stands although its object has no end
                return at
            case _:
                self.state = "bad"
                return at
        return at + 1

    def _open_object(self, text: str, at: int) -> int:
        self._reset()
        self._place = "first"
        return self._next_key(text, at)

    def _next_key(self, text: str, at: int) -> int:
        """Past "{" or ",", and past a key that is written as usual."""
        plain = _NEXT_KEY.match(text, at)
        return self._pass_key(plain) if plain else at + 1

    def _begin_key(self, text: str, at: int) -> int:
        if plain := _PLAIN_KEY.match(text, at):
            self._take_key(plain.group(1))
            return plain.end()
        self._value, self._key = JsonReader(), ""
        return at

    def _pass_key(self, plain: re.Match[str]) -> int:
        """A key and its colon. Returns where the value begins, or where the key ends if it is wrong."""
        self._take_key(plain[1])
        if self.state == "bad":
            return plain.end(1) + 1
        self._place = "value"
        return plain.end()

    def _begin_value(self, c: str, text: str, at: int) -> int:
        is_arguments = self._body.keyed or self._key in self._body.arguments
        if is_arguments and c == "{" and self._name and not self._finished:
            self._arguments = ArgumentsReader(self._sink, self._name, self._id)
        elif c not in ('{"n' if is_arguments else '"' if self._is_name_key() else _JSON_BEGINS):
            self.state = "bad"
        elif self._is_name_key() and not is_arguments and (plain := _PLAIN_TEXT.match(text, at)):
            self._place = "member"
            self._take_name(plain[1])
            return plain.end()
        else:
            self._value = JsonReader()
        return at

    def _is_name_key(self) -> bool:
        return not self._body.keyed and self._key in self._body.name

    def _feed_arguments(self, text: str, at: int) -> int:
        reader = self._arguments
        assert reader is not None
        end = reader.feed(text, at)
        if reader.state == "done":
            self._sink.end()
            self._arguments, self._finished, self._place = None, True, "member"
            self._warn()
        elif reader.state == "bad":
            self.state = "bad"
        return end

    def _feed_value(self, text: str, at: int) -> int:
        """A key, or a value that is not streamed."""
        reader = self._value
        assert reader is not None
        end = reader.feed(text, at)
        if reader.state == "bad":
            self.state = "bad"
        elif reader.state == "done":
            self._value = None
            written = "".join(reader.out)
            if self._place in ("first", "key"):
                self._take_key(json.loads(written))
            else:
                self._place = "member"
                self._take_value(written)
        return end

    def _take_key(self, key: str) -> None:
        body = self._body
        self._key, self._place = key, "colon"
        if body.keyed:
            self._name = key
        elif self._strict_keys and key not in (*body.name, *body.arguments, *body.id, "type"):
            self.state = "bad"
        if body.keyed and not is_name(key):
            self.state = "bad"

    def _take_value(self, written: str) -> None:
        body, key = self._body, self._key
        if body.keyed or key in body.arguments:
            self._take_arguments(written)
        elif key in body.name:
            self._take_name(json.loads(written))
        elif key in body.id and not self._finished:
            id = json.loads(written)
            self._id = id if is_name(id) else ""
            if id and not self._id and not isinstance(id, (int, float)):
                self._extra.append(f"{json.dumps(key, ensure_ascii=False)}: {written}")
        elif key not in _HARMLESS:
            self._extra.append(f"{json.dumps(key, ensure_ascii=False)}: {written}")

    def _take_name(self, name: object) -> None:
        if self._name or not is_name(name):
            self.state = "bad"
            return
        self._name = str(name)
        if self._early is not None:
            self._give(self._early)

    def _take_arguments(self, written: str) -> None:
        """Arguments that were not streamed: before the name, null, or JSON inside a string."""
        if self._finished or self._early is not None:
            self.state = "bad"  # arguments twice
            return
        if written == "null":
            written = "{}"
        elif written.startswith('"'):
            written = json.loads(written).strip()
            inner = JsonReader()
            end = inner.feed(written, 0)
            if not written.startswith("{") or inner.state != "done" or end < len(written) or not _is_text(written):
                self.state = "bad"
                return
            written = "".join(inner.out)
        self._give(written)

    def _give(self, arguments: str) -> None:
        """Complete arguments: a call when the name is known, kept otherwise."""
        if not self._name:
            self._early = arguments
            return
        self._sink.start(self._name, self._id)
        self._sink.args(arguments)
        self._sink.end()
        self._finished = True

    def _warn(self) -> None:
        """Fields that are not used must not get lost in silence."""
        for written in self._extra:
            self._sink.events.append(ParseWarning("a tool call has a field that is none", written))
        self._extra = []

    def _end_object(self, at: int) -> int:
        if not self._finished:
            if not self._name or self._early is not None or self._extra or self._body.required or self._body.keyed:
                self.state = "bad"
                return at
            self._give("{}")
        self._warn()
        self._place = "next"
        if not self._in_list:
            self.state = "done"
        return at + 1


def _is_text(text: str) -> bool:
    """Whether it can be sent: lone surrogates cannot."""
    return not any("\ud800" <= c <= "\udfff" for c in text)

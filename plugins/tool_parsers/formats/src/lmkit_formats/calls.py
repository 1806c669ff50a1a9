"""Readers of call bodies: the part of a tool format between its markers. One class per kind of body.

A reader is fed text and reports calls to a CallSink. It stops at the end of each call (`state` "more", no call open),
of the body ("done"), or at the first character that does not belong to it ("bad", that character is left unread).
What it consumed of a call that never began is kept by its caller; of a call that began, `leftover` says what of it is
not in the arguments.
"""

from __future__ import annotations

import json
import re
import secrets
import string
from dataclasses import dataclass
from typing import Literal, Protocol

from lmkit.api import ParseEvent, ParseWarning, Text, ToolArgs, ToolEnd, ToolStart

from lmkit_formats.jsonread import JsonReader
from lmkit_formats.markers import BLANKS, markers, skip_blanks

State = Literal["more", "done", "bad"]
MAX_NAME = 256  # characters of a tool's name or a key
_PLAIN_KEY = re.compile(r'"([A-Za-z_]{1,64})"')
# the usual way to write these: one match instead of a step for each part
_NEXT_KEY = re.compile(r'[{,][ \t\r\n]*"([A-Za-z_]{1,64})"[ \t\r\n]*:')
_PLAIN_TEXT = re.compile(r'"([^"\\\x00-\x1f]{0,256})"')
_JSON_BEGINS = '-0123456789tfn"{['
_HARMLESS = ("id", "type")  # fields of a call that say nothing more
_ALPHANUMERIC = string.ascii_letters + string.digits


@dataclass(frozen=True, slots=True)
class JsonCalls:
    """{"name": ..., "arguments": {...}}, keys in any order."""

    name: tuple[str, ...] = ("name",)
    arguments: tuple[str, ...] = ("arguments", "parameters")
    id: tuple[str, ...] = ()  # keys whose value is the id of the call
    many: Literal["one", "list", "any"] = "one"  # an object; an array of objects; either
    keyed: bool = False  # {NAME: {...}} instead of named fields
    required: bool = False  # a call without arguments is none


@dataclass(frozen=True, slots=True)
class NamedJson:
    """The name, a separator, the arguments as a JSON object: get_time<sep>{"zone": "UTC"}."""

    ends: tuple[str, ...]  # what ends the name; "{" is not consumed
    prefix: tuple[str, ...] = ()  # constant texts before the name
    id_mark: str = ""  # comes between the name and its end, followed by the id of the call
    pattern: str = r"(?P<name>[^\s<>\[\]{}|]+)"  # of what stands for the name; groups "name" and perhaps "id"
    written: str = "{name}"  # how a name is written; may use {index}


class CallSink:
    """Turns calls into events. The arguments of a call join to JSON: `end` closes what is still open."""

    def __init__(self, id_length: int = 0) -> None:
        self._events: list[ParseEvent] = []
        self._texts: list[str] = []  # content that comes after `_events`
        self.num_calls = 0
        self.open = False  # a call began and has not ended
        self._id_length = id_length
        self._ids: set[str] = set()
        self._number = secrets.randbits(96)  # of the next id: they count from a random one

    @property
    def events(self) -> list[ParseEvent]:
        """What there is so far, to append to. Neighbouring pieces of content are one event."""
        if self._texts:
            self._events.append(Text("".join(self._texts)))
            self._texts = []
        return self._events

    def take(self) -> list[ParseEvent]:
        """The events, once."""
        events, self._events = self.events, []
        return events

    def text(self, text: str) -> None:
        self._texts.append(text)

    def start(self, name: str, id: str = "") -> None:
        if not id or id in self._ids:
            id = self._new_id()
        self._ids.add(id)
        self.events.append(ToolStart(self.num_calls, id, name))
        self.num_calls += 1
        self.open = True

    def args(self, fragment: str) -> None:
        if fragment:
            self.events.append(ToolArgs(self.num_calls - 1, fragment))

    def end(self, closing: str = "") -> None:
        self.args(closing)
        self.events.append(ToolEnd(self.num_calls - 1))
        self.open = False

    def _new_id(self) -> str:
        self._number += 1
        if not self._id_length:
            return f"call_{self._number % (1 << 96):024x}"
        number, digits = self._number, ""
        for _ in range(self._id_length):
            number, digit = divmod(number, len(_ALPHANUMERIC))
            digits += _ALPHANUMERIC[digit]
        return digits


class BodyReader(Protocol):
    state: State

    def feed(self, text: str, at: int, final: bool) -> int:
        """Where it stopped. What it leaves unread in state "more", with no call ended, is fed again with more text."""
        ...

    def closing(self) -> str:
        """What completes the arguments of the open call."""
        ...

    def leftover(self) -> str:
        """What was consumed of the open call and is not in its arguments."""
        ...


class ArgumentsReader:
    """A JSON object that is the arguments of a call: announced when it has begun well, then streamed."""

    def __init__(self, sink: CallSink, name: str, id: str = "") -> None:
        self._sink, self._name, self._id = sink, name, id
        self._json = JsonReader()
        self._begun = False
        self._started = False
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
        end = self._json.feed(text, at)
        if not self._started and self._json.begun:
            self._sink.start(self._name, self._id)
            self._started = True
        if self._started and self._json.out:
            self._sink.args("".join(self._json.out))
            self._json.out.clear()
        self.state = self._json.state  # type: ignore[assignment]
        return end

    def closing(self) -> str:
        return self._json.closing()

    def leftover(self) -> str:
        return self._json.leftover()


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
                    at = self._structure(text, at)
            if not self._sink.open and (was_open or self._sink.num_calls > num_calls):
                break  # a call ended
        return at

    def closing(self) -> str:
        return self._arguments.closing() if self._arguments else ""

    def leftover(self) -> str:
        extra = ", ".join(self._extra)
        return extra + self._arguments.leftover() if self._arguments else extra

    def _structure(self, text: str, at: int) -> int:
        """One character of the array or of the outer object. A wrong one is left unread."""
        c, place, many = text[at], self._place, self._body.many
        if place == "begin" and c == "[" and many != "one" and not self._in_list:
            self._in_list, self._place = True, "element"
        elif c == "{" and (place == "element" or (place == "begin" and many != "list")):
            self._reset()
            self._place = "first"
            if plain := _NEXT_KEY.match(text, at):
                return self._pass_key(plain)
        elif (place == "element" and c == "]") or (place == "next" and c == "]"):
            self.state = "done"
        elif place == "next" and c == ",":
            self._place = "element"
        elif place in ("first", "key") and c == '"':
            if plain := _PLAIN_KEY.match(text, at):
                self._take_key(plain.group(1))
                return plain.end()
            self._value, self._key = JsonReader(), ""
            return at
        elif place == "colon" and c == ":":
            self._place = "value"
        elif place == "value":
            return self._begin_value(c, text, at)
        elif place == "member" and c == "," and not self._body.keyed:
            self._place = "key"
            if plain := _NEXT_KEY.match(text, at):
                return self._pass_key(plain)
        elif place == "member" and c == "}":
            self._end_object()
        elif place == "member" and self._finished:
            self.state = "done"  # the call stands although its object has no end
            return at
        else:
            self.state = "bad"
            return at
        return at + 1 if self.state != "bad" else at

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

    def _end_object(self) -> None:
        if not self._finished:
            if not self._name or self._early is not None or self._extra or self._body.required or self._body.keyed:
                self.state = "bad"
                return
            self._give("{}")
        self._warn()
        self._place = "next"
        if not self._in_list:
            self.state = "done"


class NamedJsonReader:
    """NamedJson: the name up to its end, then the arguments."""

    def __init__(self, body: NamedJson, sink: CallSink) -> None:
        self._body, self._sink = body, sink
        self.state: State = "more"
        self._prefix = list(body.prefix)
        self._ends = markers(*body.ends, body.id_mark)
        self._head: list[str] = []
        self._num_head = 0
        self._id: str | None = None  # what was read after the name, when the id has its own place
        self._name = ""
        self._pattern = re.compile(body.pattern)
        self._arguments: ArgumentsReader | None = None

    def feed(self, text: str, at: int, final: bool) -> int:
        while at < len(text) and self.state == "more":
            if self._arguments is not None:
                at = self._arguments.feed(text, at)
                self.state = self._arguments.state
                if self.state == "done":
                    self._sink.end()
                return at
            at, good = read_prefix(self._prefix, text, at, final)
            if not good:
                self.state = "bad"
            if not good or self._prefix:
                return at
            at = self._read_head(text, at, final)
            if self._arguments is None:
                return at
        return at

    def closing(self) -> str:
        return self._arguments.closing() if self._arguments else ""

    def leftover(self) -> str:
        return self._arguments.leftover() if self._arguments else ""

    def _read_head(self, text: str, at: int, final: bool) -> int:
        begin, end, marker = self._ends.find(text, at, final, MAX_NAME)
        limit = at + MAX_NAME - self._num_head
        if begin > limit:  # at a place that does not depend on how the text is split
            self.state = "bad"
            return limit
        self._head.append(text[at:begin])
        self._num_head += begin - at
        if marker is None:
            return begin
        head, self._head, self._num_head = "".join(self._head).strip(), [], 0
        if not self._name:
            good = self._take_name(head)
        else:
            good, self._id = self._id is None, head
        if not good:
            self.state = "bad"
            return begin
        if marker != self._body.id_mark:
            self._arguments = ArgumentsReader(self._sink, self._name, self._id or "")
        return begin if marker == "{" else end

    def _take_name(self, head: str) -> bool:
        match = self._pattern.fullmatch(head)
        groups = match.groupdict() if match else {}
        if not is_name(groups.get("name")):
            return False
        self._name, self._id = groups["name"], groups.get("id")
        return True


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


def _is_text(text: str) -> bool:
    """Whether it can be sent: lone surrogates cannot."""
    return not any("\ud800" <= c <= "\udfff" for c in text)

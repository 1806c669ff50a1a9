"""NamedJson: the name of the tool, then its arguments as a JSON object."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lmkit.api import ToolDef

from lmkit_formats.calls import MAX_NAME, ArgumentsReader, BodyReader, CallBody, State, is_name, read_prefix
from lmkit_formats.markers import markers
from lmkit_formats.sink import CallSink
from lmkit_formats.tags import Tag, dump, schema_of


@dataclass(frozen=True, slots=True)
class NamedJson(CallBody):
    """The name, a separator, the arguments as a JSON object: get_time<sep>{"zone": "UTC"}."""

    ends: tuple[str, ...]  # what ends the name; "{" is not consumed
    prefix: tuple[str, ...] = ()  # constant texts before the name
    id_mark: str = ""  # comes between the name and its end, followed by the id of the call
    pattern: str = r"(?P<name>[^\s<>\[\]{}|]+)"  # of what stands for the name; groups "name" and perhaps "id"
    written: str = "{name}"  # how a name is written; may use {index}

    is_named = True

    @property
    def texts(self) -> tuple[str, ...]:
        return (*self.ends, *self.prefix, self.id_mark)

    def reader(self, sink: CallSink, tools: Sequence[ToolDef], ends: Sequence[str], *, strict_keys: bool) -> BodyReader:
        return NamedJsonReader(self, sink)

    def frame(self, name: str, index: str) -> tuple[str, str]:
        end = "" if self.ends[0] == "{" else self.ends[0]
        written = self.written.replace("{name}", name).replace("{index}", index)
        return "".join(self.prefix) + written + end, ""

    def write(self, arguments: Mapping[str, Any], schema: Mapping[str, Any]) -> str:
        return dump(arguments)

    def accept(self, tool: ToolDef) -> Tag:
        return {"type": "json_schema", "json_schema": schema_of(tool)}


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

    def cut(self) -> str:
        return self._arguments.cut() if self._arguments else ""

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

"""The machine of formats in which the output is messages, each with a header (ChannelFormat).

    START header MESSAGE body END START header MESSAGE body END ...

The prompt ends inside the first header. A header names a channel and perhaps a recipient; from these the body is
reasoning, content, or the arguments of a call. Calls that break are handled as lmkit_formats.parsing says.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from lmkit.api import DeclaredFormat, ParseEvent, ParseWarning, Reasoning, StreamParser, Text, Thinking, ToolDef

from lmkit_formats.calls import ArgumentsReader, is_name
from lmkit_formats.markers import markers, skip_blanks
from lmkit_formats.sink import CallSink
from lmkit_formats.tags import Calls, Tag, dump, schema_of, tag_of

MAX_HEADER = 1024  # characters; what is longer is text

Kind = Literal["reasoning", "content", "call"]


@dataclass(frozen=True, slots=True)
class ChannelFormat(DeclaredFormat):
    """Messages with a header that names a channel, perhaps a recipient: <start>role to=f<channel>c<message>body
    <end>. The prompt ends after the role of the first. It reads reasoning, content and calls: no other format runs
    beside it."""

    name: str
    start: str  # begins a message
    channel: str  # begins the name of its channel
    message: str  # begins its body
    ends: tuple[str, ...]  # what ends a message
    role: str  # of the model's own messages
    reasoning: tuple[str, ...]  # channels whose messages are reasoning; all others are content
    final: str  # the channel of answers
    call: str  # the channel of calls
    content_type: str = ""  # what the header of a call ends with
    content_types: tuple[str, ...] = ()  # all that it may end with
    to: str = "to="  # before the recipient
    namespace: str = ""  # of the recipients that are tools; not part of their names
    nobody: tuple[str, ...] = ()  # recipients that are not tools; messages to them are reasoning
    calls: bool = True  # messages to tools are calls; False: they are content, without their header
    special: tuple[str, ...] = ()  # further special tokens of headers

    @property
    def keep_special(self) -> frozenset[str]:
        return frozenset((self.start, self.channel, self.message, *self.ends, *self.special))

    @property
    def within_turn(self) -> frozenset[str]:
        return frozenset()  # its tokens end messages, and so perhaps turns

    @property
    def whole(self) -> bool:
        return self.calls

    def build(
        self, prompt_tail: str | None, tools: Sequence[ToolDef], template_kwargs: Mapping[str, object], *,
        constrained: bool,
    ) -> StreamParser:  # fmt: skip
        return ChannelParser(self, prompt_tail or "", constrained=constrained)

    def tag(self, tools: Sequence[ToolDef], *, free: bool, parallel: bool) -> Tag | None:
        """One call, after the thinking: the model ends its turn with it."""
        if free:
            return None
        schemas: list[Tag] = [{"type": "json_schema", "json_schema": schema_of(t)} for t in tools]
        calls = [tag_of(self._call_header(t.name), s, "") for t, s in zip(tools, schemas, strict=True)]
        return {"type": "or", "elements": calls}

    def thinking(self, prompt_tail: str, template_kwargs: Mapping[str, object], budget: int | None) -> Thinking | None:
        opens = tuple(f"{self.channel}{name}{self.message}" for name in self.reasoning)
        return Thinking((self._next,), opens, budget=budget)

    @property
    def answer_header(self) -> str:
        return f"{self.channel}{self.final}{self.message}"

    def write(self, calls: Calls, tools: Sequence[ToolDef] = ()) -> str:
        return self._next.join(self._call_header(name) + dump(arguments) for name, arguments in calls)

    @property
    def thought(self) -> tuple[str, str]:
        begin, end = self.channel, self.message
        return f"{begin}{self.reasoning[0]}{end}", self._next + self.answer_header

    @property
    def _next(self) -> str:
        """What ends a message and begins the next one of the model."""
        return f"{self.ends[0]}{self.start}{self.role}"

    def _call_header(self, name: str) -> str:
        return f" {self.to}{self.namespace}{name}{self.channel}{self.call} {self.content_type}{self.message}"


class ChannelParser:
    """States: before the first header, in a header, in a body, between messages, in text that is no message."""

    def __init__(self, fmt: ChannelFormat, prompt_tail: str, *, constrained: bool = False) -> None:
        """`constrained`: markers in the content and in the arguments of a call are text."""
        self._fmt, self._constrained = fmt, constrained
        self._openings = markers(fmt.start, fmt.channel, fmt.message, fmt.to, fmt.role)  # how an output begins
        self._header_starts = markers(fmt.start, fmt.channel)
        self._header_ends = markers(fmt.message, fmt.start, *fmt.ends)
        self._body_ends = markers(fmt.start, *fmt.ends)
        self._channel = re.compile(re.escape(fmt.channel) + r"\s*(\w+)")
        self._recipient = re.compile(r"(?<!\w)" + re.escape(fmt.to) + r"([^\s<]+)")
        self._sink = CallSink()
        self._state: Callable[[str, int, bool], int] = self._before
        self._held = ""
        self._lead = ""  # the marker before a header, shown when it turns out to be none
        self._kind: Kind = "content"
        self._gaps: dict[Kind, str] = {"reasoning": "", "content": ""}  # what comes before the next text of a kind
        self._arguments: ArgumentsReader | None = None
        self._name = ""
        self._raw: list[str] = []  # of a message to a tool, as written, until its arguments end
        header, mark, body = prompt_tail.rpartition(fmt.start)[2].partition(fmt.message)
        if mark and self._body_ends.find(body, 0, final=True).marker is None:
            self._open(header)  # the prompt ends in a message that is to be continued

    @property
    def inside(self) -> bool:
        """True in reasoning."""
        return self._state == self._in_body and self._kind == "reasoning"

    @property
    def pending(self) -> int:
        """Characters that were fed and are not decided yet."""
        return len(self._held) + (0 if self._sink.open else sum(map(len, self._raw)))

    def feed(self, text: str, ids: Sequence[int] = ()) -> list[ParseEvent]:
        return self._run(text, final=False)

    def flush(self) -> list[ParseEvent]:
        events = self._run("", final=True)
        if self._state == self._in_header and self._lead:
            self._no_message("")
        if self._arguments is not None:
            self._break("the output ended inside a tool call", ended=True)
        self._state = self._in_text
        return [*events, *self._sink.take()]

    def _run(self, text: str, final: bool) -> list[ParseEvent]:
        text, self._held = self._held + text, ""
        at = 0
        while at < len(text):
            at = self._state(text, at, final)
        return self._sink.take()

    # Each state reads `text` from `at` and returns where the next state goes on.

    def _before(self, text: str, at: int, final: bool) -> int:
        """The prompt has begun a header; an output that does not go on with it has no messages."""
        found = self._openings.at(text, at, final)
        if found is not None and found.marker is None:
            return self._hold(text, at)
        is_header = found is not None and found.marker != self._fmt.start
        self._state = self._in_header if is_header else self._in_text
        return at

    def _in_header(self, text: str, at: int, final: bool) -> int:
        header = text[at : at + MAX_HEADER]
        is_all = final or len(header) == MAX_HEADER
        begin, end, marker = self._header_ends.find(header, 0, is_all)
        if marker is None and not is_all:
            return self._hold(text, at)
        if marker == self._fmt.message:
            self._open(header[:begin])
            return at + end
        end = begin if marker == self._fmt.start else end
        self._no_message(header[:end])
        return at + end

    def _in_body(self, text: str, at: int, final: bool) -> int:
        if self._constrained and self._arguments is not None:
            return at + self._give_arguments(self._arguments, text[at:])
        if self._constrained and self._kind == "content":
            self._give(text[at:])
            return len(text)
        begin, end, marker = self._body_ends.find(text, at, final)
        self._give(text[at:begin])
        if marker is None:
            return self._hold(text, begin)
        self._close()
        return begin if marker == self._fmt.start else end

    def _between(self, text: str, at: int, final: bool) -> int:
        """Blanks between messages belong to the format."""
        at = skip_blanks(text, at)
        found = self._header_starts.at(text, at, final)
        if at == len(text) or (found is not None and found.marker is None):
            return self._hold(text, at)
        self._state = self._in_text
        return at

    def _in_text(self, text: str, at: int, final: bool) -> int:
        self._kind = "content"
        begin, end, marker = self._header_starts.find(text, at, final)
        self._give(text[at:begin])
        if marker is None:
            return self._hold(text, begin)
        self._state = self._in_header
        self._lead = marker if marker == self._fmt.start else ""
        return end if self._lead else begin

    def _hold(self, text: str, at: int) -> int:
        self._held = text[at:]
        return len(text)

    def _open(self, header: str) -> None:
        """A message begins."""
        fmt = self._fmt
        channel, to = (m.group(1) if (m := p.search(header)) else "" for p in (self._channel, self._recipient))
        self._name = "" if to in fmt.nobody else to.removeprefix(fmt.namespace)
        self._state = self._in_body
        raw, self._lead = self._lead + header + fmt.message, ""
        self._check(header, channel, to)
        if not is_name(self._name):
            is_thought = channel in fmt.reasoning or (to in fmt.nobody and channel != fmt.final)
            self._kind = "reasoning" if is_thought else "content"
        elif fmt.calls:
            self._kind, self._raw = "call", [raw]
            self._arguments = ArgumentsReader(self._sink, self._name)
        else:
            self._kind = "content"
            self._sink.events.append(ParseWarning("a call where there are no tools", raw))

    def _check(self, header: str, channel: str, to: str) -> None:
        """What stands in a header and has no meaning must not get lost in silence."""
        fmt, rest = self._fmt, header
        if channel in (*fmt.reasoning, fmt.final, fmt.call):
            rest = self._channel.sub(" ", rest, count=1)
        if to in fmt.nobody or is_name(self._name):
            rest = self._recipient.sub(" ", rest, count=1)
        for text in (fmt.role, *fmt.special, *fmt.content_types):
            rest = rest.replace(text, " ")
        if rest.strip():
            self._sink.events.append(ParseWarning("a header with words that have no meaning", header))

    def _give(self, text: str) -> None:
        """Text of the message."""
        if self._arguments is not None:
            text = text[self._give_arguments(self._arguments, text) :]
        if self._kind == "call":  # after the arguments
            if text := text.lstrip():
                self._kind = "content"
                self._give(text)
        elif text:
            text, self._gaps[self._kind] = self._gaps[self._kind] + text, ""
            self._sink.events.append(Text(text) if self._kind == "content" else Reasoning(text))

    def _give_arguments(self, arguments: ArgumentsReader, text: str) -> int:
        """Returns where the arguments end."""
        end = arguments.feed(text, 0)
        self._raw.append(text[:end])
        if arguments.state == "done":
            self._raw, self._arguments = [], None
            self._sink.end()
        elif arguments.state == "bad":
            self._break("a tool call is malformed")
        return end

    def _break(self, message: str, ended: bool = False) -> None:
        """A call that was not announced is content, an announced one is cut."""
        arguments, self._arguments = self._arguments, None
        assert arguments is not None
        raw, self._raw = "".join(self._raw), []
        if self._sink.open:
            rest = arguments.cut()
            self._sink.cut(raw.removesuffix(rest))
            raw = rest
        self._sink.drop()
        self._kind = "content"
        self._sink.events.append(ParseWarning(message, in_call=ended))
        self._give(raw)

    def _close(self) -> None:
        """The message ends. A call without arguments has none."""
        if self._arguments is not None and not self._sink.open and not "".join(self._raw[1:]).strip():
            self._sink.start(self._name)
            self._sink.end("{}")
            self._raw, self._arguments = [], None
        if self._arguments is not None:
            self._break("a tool call ended inside its arguments")
        if self._kind != "call":
            self._gaps[self._kind] = "\n"
        self._state = self._between

    def _no_message(self, header: str) -> None:
        """What looked like a header is content."""
        self._kind, self._state = "content", self._in_text
        self._sink.events.append(ParseWarning("a message without a body"))
        self._give(self._lead + header)
        self._lead = ""

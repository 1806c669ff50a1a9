"""Stream parsers for formats that are a table (TagFormat): one machine per body kind, all with `feed` and `flush`.

Text that may begin a marker is held back, at most one marker's length; nothing is scanned twice, so the work is linear
in the text. What does not parse is returned as text with nothing lost.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Sequence

from lmkit.api import (
    ParseEvent,
    ParserFormat,
    Reasoning,
    StreamParser,
    TagFormat,
    Text,
    ToolArgs,
    ToolDef,
    ToolEnd,
    ToolStart,
)
from lmkit.text.calls import CallScanner

_MAX_GAP = 64  # blanks that are held back while it is open what follows them


class Markers:
    """Finds the first of several literal markers, and how much of the end of a text may begin one."""

    __slots__ = ("_pattern", "_prefixes", "_reach")

    def __init__(self, *markers: str) -> None:
        self._pattern = re.compile("|".join(re.escape(m) for m in sorted(markers, key=len, reverse=True)))
        self._prefixes = frozenset(m[:k] for m in markers for k in range(1, len(m)))
        self._reach = max(map(len, markers)) - 1

    def find(self, text: str, start: int) -> tuple[int, str] | None:
        """(position, marker) of the first marker at or after `start`."""
        found = self._pattern.search(text, start)
        return (found.start(), found.group()) if found else None

    def undecided(self, text: str, start: int) -> int:
        """Position from which the end of `text` may begin a marker; len(text) when it cannot."""
        for at in range(max(start, len(text) - self._reach), len(text)):
            if text[at:] in self._prefixes:
                return at
        return len(text)


def start_parser(fmt: TagFormat | ParserFormat, prompt_tail: str, tools: Sequence[ToolDef] = ()) -> StreamParser:
    """A parser for one choice. `prompt_tail`: the end of the rendered prompt."""
    if not isinstance(fmt, TagFormat):
        return fmt.start(prompt_tail, tools)
    if fmt.body == "reasoning":
        return ReasoningParser(fmt, inside=prompt_tail.rstrip().endswith(fmt.open))
    return CallsParser(fmt)


class ReasoningParser:
    """One body at the start of the output. Without `open` (in the prompt or the output) everything is text."""

    def __init__(self, fmt: TagFormat, *, inside: bool) -> None:
        self.inside = inside
        self._open, self._close = fmt.open, fmt.close
        self._ends = Markers(fmt.close, *fmt.until)
        self._state = "start"  # "start" (blanks, perhaps `open`), "body", "text"
        self._held = ""

    def feed(self, text: str, ids: Sequence[int] = ()) -> list[ParseEvent]:
        if self._state == "text":
            return [Text(text)] if text else []
        text, self._held = self._held + text, ""
        at = 0
        if self._state == "start":
            at = self._begin(text)
            if self._state == "start":
                self._held = text
                return []
            if self._state == "text":
                return [Text(text)] if text else []
        return self._body(text, at)

    @property
    def pending(self) -> int:
        """Characters that were fed and are not decided yet."""
        return len(self._held)

    def flush(self) -> list[ParseEvent]:
        held, self._held = self._held, ""
        if not held:
            return []
        return [Reasoning(held) if self.inside else Text(held)]

    def _begin(self, text: str) -> int:
        """Decides whether the output starts with `open`; returns where the body begins."""
        rest = text.lstrip()
        blank = len(text) - len(rest)
        if blank <= _MAX_GAP:
            if rest.startswith(self._open):
                self.inside, self._state = True, "body"
                return blank + len(self._open)
            if self._open.startswith(rest):
                return 0  # still open
        self._state = "body" if self.inside else "text"
        return 0

    def _body(self, text: str, at: int) -> list[ParseEvent]:
        found = self._ends.find(text, at)
        if found is None:
            end = self._ends.undecided(text, at)
            self._held = text[end:]
            return [Reasoning(text[at:end])] if end > at else []
        end, marker = found
        self.inside, self._state = False, "text"
        events: list[ParseEvent] = [Reasoning(text[at:end])] if end > at else []
        rest = text[end + len(marker) :] if marker == self._close else text[end:]
        if rest:
            events.append(Text(rest))
        return events


class CallsParser:
    """Any number of calls between `open` and `close`, text around them. Blanks next to a call are not content."""

    def __init__(self, fmt: TagFormat) -> None:
        self._open, self._close = fmt.open, fmt.close
        self._opens, self._closes = Markers(fmt.open), Markers(fmt.close)
        self._state = self._in_text
        self._held = ""
        self._gap: str | None = ""  # blanks since the start or the last call; None once there was text
        self._num_calls = 0
        self._raw: list[str] = []  # the call as written, until it has been started
        self._num_raw = 0  # its characters
        self._call: CallScanner | None = None

    def feed(self, text: str, ids: Sequence[int] = ()) -> list[ParseEvent]:
        text, self._held = self._held + text, ""
        events: list[ParseEvent] = []
        at = 0
        while at < len(text):
            at = self._state(text, at, events)
        return events

    @property
    def pending(self) -> int:
        """Characters that were fed and are not decided yet."""
        return len(self._held) + len(self._gap or "") + self._num_raw

    def flush(self) -> list[ParseEvent]:
        events: list[ParseEvent] = []
        held, self._held = self._held, ""
        if self._state == self._in_call and self._call is not None and not self._call.started:
            self._text("".join(self._raw) + held, events)
        elif self._state in (self._in_call, self._in_broken):
            if held:
                events.append(ToolArgs(self._num_calls - 1, held))
            events.append(ToolEnd(self._num_calls - 1))
        elif held:
            self._text(held, events)
        if self._gap and not self._num_calls:
            events.append(Text(self._gap))
        self._gap, self._state, self._num_raw = None, self._in_text, 0
        return events

    # Each state reads `text` from `at`, appends events and returns where the next state goes on.

    def _in_text(self, text: str, at: int, events: list[ParseEvent]) -> int:
        found = self._opens.find(text, at)
        if found is None:
            end = self._opens.undecided(text, at)
            self._text(text[at:end], events)
            self._held = text[end:]
            return len(text)
        self._text(text[at : found[0]], events)
        begin = (self._gap or "") + self._open  # the blanks are content after all if this turns out to be no call
        self._gap = ""
        self._raw, self._call, self._num_raw = [begin], CallScanner(), len(begin)
        self._state = self._in_call
        return found[0] + len(self._open)

    def _in_call(self, text: str, at: int, events: list[ParseEvent]) -> int:
        call = self._call
        assert call is not None
        was_started = call.started
        end, fragments = call.feed(text, at)
        if not call.started:
            self._raw.append(text[at:end])
            self._num_raw += end - at
        elif not was_started:
            events.append(ToolStart(self._num_calls, f"call_{uuid.uuid4().hex[:24]}", call.name))
            self._num_calls += 1
            self._raw, self._num_raw = [], 0
        events += [ToolArgs(self._num_calls - 1, f) for f in fragments if f]
        if call.state == "done":
            events.append(ToolEnd(self._num_calls - 1))
            self._state = self._after_call
        elif call.state == "bad":
            if not call.started:
                self._text("".join(self._raw), events)
                self._state, self._num_raw = self._in_raw, 0
            else:
                self._state = self._in_broken
        return end

    def _after_call(self, text: str, at: int, events: list[ParseEvent]) -> int:
        """Blanks and `close`; anything else is text."""
        rest = text[at : at + _MAX_GAP + len(self._close)].lstrip()
        if rest.startswith(self._close):
            self._state = self._in_text
            return text.index(self._close, at) + len(self._close)
        if self._close.startswith(rest) and len(text) - at < _MAX_GAP + len(self._close):
            self._held = text[at:]
            return len(text)
        self._state = self._in_text
        return at

    def _in_raw(self, text: str, at: int, events: list[ParseEvent]) -> int:
        """A malformed call: everything to the end of `close` is content."""
        found = self._closes.find(text, at)
        end = self._closes.undecided(text, at) if found is None else found[0] + len(self._close)
        self._text(text[at:end], events)
        if found is not None:
            self._state = self._in_text
            return end
        self._held = text[end:]
        return len(text)

    def _in_broken(self, text: str, at: int, events: list[ParseEvent]) -> int:
        """A call that went wrong after it was announced: the rest stays in its arguments, as the model wrote it."""
        found = self._closes.find(text, at)
        end = self._closes.undecided(text, at) if found is None else found[0]
        if end > at:
            events.append(ToolArgs(self._num_calls - 1, text[at:end]))
        if found is not None:
            events.append(ToolEnd(self._num_calls - 1))
            self._state = self._in_text
            return end + len(self._close)
        self._held = text[end:]
        return len(text)

    def _text(self, text: str, events: list[ParseEvent]) -> None:
        if self._gap is not None:
            gap = self._gap + text
            if len(gap) <= _MAX_GAP and not gap.strip():
                self._gap = gap
                return
            self._gap, text = None, gap
        if text:
            events.append(Text(text))


class Chain:
    """Reasoning, then tools: the text of one stage is the input of the next."""

    def __init__(self, *stages: StreamParser) -> None:
        self._stages = stages

    @property
    def pending(self) -> int:
        """Characters that were fed and are not decided yet; 0 for parsers that do not say."""
        return sum(getattr(stage, "pending", 0) for stage in self._stages)

    def feed(self, text: str, ids: Sequence[int] = ()) -> list[ParseEvent]:
        return self._run(0, self._stages[0].feed(text, ids)) if self._stages else ([Text(text)] if text else [])

    def flush(self) -> list[ParseEvent]:
        events: list[ParseEvent] = []
        for i, stage in enumerate(self._stages):
            events += self._run(i, stage.flush())
        return events

    def _run(self, i: int, events: list[ParseEvent]) -> list[ParseEvent]:
        for stage in self._stages[i + 1 :]:
            events = [out for e in events for out in (stage.feed(e.text) if isinstance(e, Text) else [e])]
        return events


def loads_arguments(text: str) -> object:
    """The arguments of a call as a value, or the text itself when it is not JSON."""
    try:
        return json.loads(text)
    except ValueError:
        return text

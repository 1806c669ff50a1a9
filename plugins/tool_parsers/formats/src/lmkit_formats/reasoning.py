"""The reasoning of an output, apart from what follows it (ReasoningFormat).

    start --open--> body --close--> content

A text that begins a call does not end the reasoning, for a model may write about calls: what follows it is held back
until it is clear. When `close` comes, or something that is no call, it was reasoning. When the output ends with whole
calls and the reasoning was never closed, they are calls: some models forget to close it. Newlines beside the markers
belong to them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from lmkit.api import DeclaredFormat, ParseEvent, Reasoning, StreamParser, Text, Thinking, ToolDef

from lmkit_formats.jsonread import JsonReader
from lmkit_formats.markers import MAX_GAP, Found, markers, skip_blanks

# how a call goes on after its marker: with a bracket, maybe after a name
_HEAD = re.compile(rf"[ \t\r\n]{{0,{MAX_GAP}}}(?:[\w.:/-]{{1,256}}[ \t\r\n]{{0,{MAX_GAP}}})?")
_BRACKETS = "{[<("
_TAG = re.compile(r"<([\w:]+)>|\[(\w+)\]")

Step = Callable[[str, int, bool, "list[ParseEvent]"], int]


@dataclass(frozen=True, slots=True)
class ReasoningFormat(DeclaredFormat):
    """How a family writes its reasoning. Without a marker in the prompt or the output everything is content.

    A template may open the reasoning in the prompt, or open and close it at once when thinking is off: the end of the
    prompt says so. Where no prompt is known, `prompt_opens` and the template switch do.
    """

    name: str
    open: tuple[str, ...]
    close: tuple[str, ...]
    until: tuple[str, ...] = ()  # what begins a call: reasoning that is never closed ends before the calls at its end
    prompt_opens: bool = False  # the template opens the reasoning, unless thinking is switched off
    switch: tuple[str, ...] = ()  # template variables that turn thinking on or off
    off: tuple[object, ...] = (False,)  # their values that turn it off
    default_on: bool = True  # thinking when no switch is given
    anywhere: bool = False  # reasoning may begin again after content
    stray_close: bool = False  # a `close` at the start of the output, without reasoning, is not content
    drop: tuple[str, ...] = ()  # wrappers around the answer that nobody wants to see
    answer: tuple[str, ...] = ()  # what begins an answer and nothing else: it ends the reasoning although `close` is
    # missing, and is not consumed
    trim: str = "\r\n"  # characters next to `open` and `close` that belong to them

    @property
    def keep_special(self) -> frozenset[str]:
        return frozenset((*self.open, *self.close, *self.until, *self.answer, *self.drop))

    def build(
        self, prompt_tail: str | None, tools: Sequence[ToolDef], template_kwargs: Mapping[str, object], *,
        constrained: bool,
    ) -> StreamParser:  # fmt: skip
        inside = self._begins_inside(prompt_tail, template_kwargs)
        return ReasoningParser(self, inside=inside, constrained=constrained)

    def thinking(self, prompt_tail: str, template_kwargs: Mapping[str, object], budget: int | None) -> Thinking | None:
        if not self.close:
            return None
        inside = self._begins_inside(prompt_tail, template_kwargs)
        closed = any(prompt_tail.rstrip().endswith(text.rstrip()) for text in self.close)
        may_open = not inside and not closed and self._is_on(template_kwargs)
        if not inside and not may_open:
            return None
        return Thinking(self.close, self.open if may_open else (), inside, (*self.until, *self.answer), budget)

    def reopened(self, continued: str) -> str:
        opened, closed = (max(map(continued.rfind, texts), default=-1) for texts in (self.open, self.close))
        return self.open[0] if opened > closed else ""

    @property
    def thought(self) -> tuple[str, str]:
        return (self.open[0], self.close[0]) if self.open and self.close else ("", "")

    def _is_on(self, template_kwargs: Mapping[str, object]) -> bool:
        """Whether the template switches of a request leave thinking on."""
        given = [template_kwargs[name] for name in self.switch if template_kwargs.get(name) is not None]
        return given[0] not in self.off if given else self.default_on

    def _begins_inside(self, prompt_tail: str | None, template_kwargs: Mapping[str, object]) -> bool:
        """Whether the output begins inside the reasoning: the prompt tells, or else the family's habit."""
        if prompt_tail is None:
            return self.prompt_opens and self._is_on(template_kwargs)
        tail = prompt_tail.rstrip()
        return any(tail.endswith(text.rstrip()) for text in self.open)


def end_of_call(marker: str) -> str:
    """What ends a call that begins with `marker`: <x> has </x>; "" for others, after which anything is a call."""
    match = _TAG.fullmatch(marker)
    return "" if match is None else f"</{match[1]}>" if match[1] else f"[/{match[2]}]"


class ReasoningParser:
    """Reasoning at the start of the output, or with `anywhere` wherever its marker is."""

    def __init__(self, fmt: ReasoningFormat, *, inside: bool, constrained: bool = False) -> None:
        """`constrained`: a grammar sees to it that the reasoning is closed, and markers in the answer are text."""
        self.inside = inside
        self._fmt, self._constrained = fmt, constrained
        self._begins = markers(*fmt.open, *(fmt.close if fmt.stray_close else ()))
        self._stops = frozenset((*fmt.close, *fmt.answer))
        self._ends = markers(*self._stops, *fmt.until)
        in_text = (*fmt.drop, *(fmt.open if fmt.anywhere else ()))
        self._in_text = markers(*in_text) if in_text and not constrained else None
        self._state: Step = self._at_start
        self._held = ""
        self._gap = ""  # the last newlines of the reasoning so far
        self._kept: list[str] = []  # what may be calls, as written
        self._num_kept = 0  # its characters
        self._num_before = 0  # parts of it before the body of the last call
        self._call_end = ""  # what ends the call
        self._in_call_ends = self._ends
        self._object: JsonReader | None = None  # reads the object that the call is, or that follows its name
        self._num_head = 0  # characters before it
        self._any_text = False  # there was content

    @property
    def pending(self) -> int:
        """Characters that were fed and are not decided yet."""
        return len(self._held) + len(self._gap) + self._num_kept

    def feed(self, text: str, ids: Sequence[int] = ()) -> list[ParseEvent]:
        return self._run(text, final=False)

    def flush(self) -> list[ParseEvent]:
        events = self._run("", final=True)
        is_whole = self._state == self._after_call or (self._state == self._in_call and self._needs_no_end())
        calls = "".join(self._kept)
        self._kept, self._num_kept = [], 0
        if is_whole and not self._constrained:
            self._give("", events, keep=0)
            self.inside = False
            events += [Text(part) for part in _without(calls, self._fmt.drop) if part]
        else:
            self._give(calls, events, keep=0)
        self._state = self._in_content
        return events

    def _needs_no_end(self) -> bool:
        """Whether the call is whole although its end is missing."""
        body, reader = "".join(self._kept[self._num_before :]).strip(), JsonReader()
        return not self._call_end or (reader.feed(body, 0) == len(body) > 0 and reader.state == "done")

    def _run(self, text: str, final: bool) -> list[ParseEvent]:
        text, self._held = self._held + text, ""
        events: list[ParseEvent] = []
        at = 0
        while at < len(text):
            at = self._state(text, at, final, events)
        return events

    # Each state reads `text` from `at` and returns where the next state goes on.

    def _at_start(self, text: str, at: int, final: bool, events: list[ParseEvent]) -> int:
        """Blanks, perhaps `open`."""
        found = self._begins.at(text, at, final) if skip_blanks(text, at) - at <= MAX_GAP else None
        if found is not None and found.marker is None:
            return self._hold(text, at)
        if found is not None:
            self.inside, at = found.marker in self._fmt.open, found.end
            self._state = self._after_marker
        else:
            self._state = self._after_marker if self.inside else self._in_content
        return at

    def _after_marker(self, text: str, at: int, final: bool, events: list[ParseEvent]) -> int:
        """Newlines at the beginning of the reasoning or of the content."""
        while at < len(text) and text[at] in self._fmt.trim:
            at += 1
        near = self.inside and at < len(text) and skip_blanks(text, at) - at <= MAX_GAP
        again = markers(*self._fmt.open).at(text, at, final) if near else None
        if again is not None:  # `open` twice
            return self._hold(text, at) if again.marker is None else again.end
        if at < len(text):
            self._state = self._in_body if self.inside else self._in_content
        return at

    def _in_body(self, text: str, at: int, final: bool, events: list[ParseEvent]) -> int:
        begin, end, marker = self._ends.find(text, at, final)
        is_call = marker in self._fmt.until
        self._give(text[at:begin], events, keep=0 if is_call else MAX_GAP)
        if marker is None:
            return self._hold(text, begin)
        if is_call:
            self._begin_call(marker)
            return end
        self._gap, self.inside = "", False
        is_close = marker in self._fmt.close
        is_exact = self._any_text or self._constrained
        self._state = self._after_marker if is_close and not is_exact else self._in_content
        return end if is_close else begin

    def _begin_call(self, marker: str) -> None:
        self._call_end = end_of_call(marker)
        again = [f"\n{begin}" for begin in self._fmt.until]  # what came before it was no call
        self._in_call_ends = markers(*self._stops, *((self._call_end, *again) if self._call_end else ()))
        self._keep(marker)
        self._num_before = len(self._kept)
        self._object, self._state = None, self._call_begins if self._call_end else self._in_call

    def _call_begins(self, text: str, at: int, final: bool, events: list[ParseEvent]) -> int:
        """Whether what follows the marker can be a call at all."""
        end = _HEAD.match(text, at).end()  # type: ignore[union-attr]
        again = markers(*self._fmt.until).at(text, end, final)
        if (end == len(text) and not final) or (again is not None and again.marker is None):
            return self._hold(text, at)
        bracket = text[end : end + 1]
        if again is None and bracket in tuple(_BRACKETS):
            self._object, self._state = JsonReader() if bracket == "{" else None, self._in_call
            self._num_head = end - at
        else:
            self._release(events)
        return at

    def _in_call(self, text: str, at: int, final: bool, events: list[ParseEvent]) -> int:
        begin, end, marker = self._in_call_ends.find(text, at, final)
        if self._object is not None and self._object.state == "more":
            head = min(self._num_head, begin - at)
            self._num_head -= head
            read = at + head + self._object.feed(text[at + head : begin], 0)
            self._object.out.clear()
            if self._object.state == "bad":  # no arguments, so no call
                self._keep(text[at:read])
                self._release(events)
                return read
        self._keep(text[at:begin])
        if marker is None:
            return self._hold(text, begin)
        if marker == self._call_end:
            self._keep(marker)
            self._state = self._after_call
            return end
        if marker not in self._stops:
            self._keep("\n")
            begin += 1
        self._release(events)
        return begin

    def _after_call(self, text: str, at: int, final: bool, events: list[ParseEvent]) -> int:
        """Blanks, and perhaps another call."""
        first = skip_blanks(text, at)
        self._keep(text[at:first])
        if first == len(text):
            return first
        found = self._ends.at(text, first, final)
        if found is not None and found.marker is None:
            return self._hold(text, first)
        if found is not None and found.marker in self._fmt.until:
            self._begin_call(found.marker)
            return found.end
        self._release(events)
        return first

    def _in_content(self, text: str, at: int, final: bool, events: list[ParseEvent]) -> int:
        found = self._in_text.find(text, at, final) if self._in_text else Found(len(text), len(text), None)
        if found.begin > at:
            events.append(Text(text[at : found.begin]))
            self._any_text = True
        if found.marker is None:
            return self._hold(text, found.begin)
        if found.marker not in self._fmt.drop:
            self.inside, self._state = True, self._after_marker
        return found.end

    def _hold(self, text: str, at: int) -> int:
        self._held = text[at:]
        return len(text)

    def _keep(self, text: str) -> None:
        self._kept.append(text)
        self._num_kept += len(text)

    def _release(self, events: list[ParseEvent]) -> None:
        """What looked like calls is reasoning."""
        text, self._kept, self._num_kept = "".join(self._kept), [], 0
        self._give(text, events, keep=MAX_GAP)
        self._state = self._in_body

    def _give(self, text: str, events: list[ParseEvent], keep: int) -> None:
        """Reasoning, without up to `keep` newlines at its end: they may belong to `close`."""
        text = self._gap + text
        end = max(len(text.rstrip(self._fmt.trim)), len(text) - keep)
        self._gap = text[end:]
        if end:
            events.append(Reasoning(text[:end]))


def _without(text: str, dropped: Sequence[str]) -> list[str]:
    """The parts of `text` between the texts that are dropped."""
    longest_first = sorted(dropped, key=len, reverse=True)
    return re.split("|".join(map(re.escape, longest_first)), text) if dropped else [text]

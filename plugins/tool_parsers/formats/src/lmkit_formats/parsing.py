"""The machine of tool calls: the text of one choice becomes content and tool calls. `feed` and `flush`, no torch.

    content --open--> tool --close--> content ...

One `ToolParser` runs every ToolFormat; bodies have readers of their own. Text that may begin a marker is
held back, at most one marker's length; nothing is scanned twice, so the work is linear in the text.

What breaks its format is handled by one rule. A call that was not announced is content, with its markers. A call that
was announced keeps the arguments it has, which do not parse, and ends with ToolCut: nobody may execute it. What is not
in its arguments is content. A call that is cut off at the end of the output counts as broken at that place; if there is
nothing of it but its marker, that is dropped. Each time a ParseWarning says so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lmkit.api import ParseEvent, ParseWarning, ToolDef

from lmkit_formats.calls import BodyReader
from lmkit_formats.content import Content
from lmkit_formats.markers import BLANKS, MAX_GAP, skip_blanks
from lmkit_formats.searches import searches_of
from lmkit_formats.sink import CallSink
from lmkit_formats.syntax import ToolSyntax

_MAX_WARNINGS = 100  # of broken calls in one output
_CLOSERS = BLANKS + ",]})"  # what may follow a finished call when the output ends early


class OpenCall:
    """A call that is being read, from its marker on."""

    __slots__ = ("body", "follows", "is_marked", "raw", "size", "was_read")

    def __init__(self, before: str, marker: str, is_marked: bool) -> None:
        """`before`: the blanks before it, which are content after all if this turns out to be no call."""
        self.raw = [before, marker]  # the call as written
        self.size = len(before) + len(marker)  # characters of `raw` that may still be content
        self.follows = False  # another call of the same body came before it
        self.is_marked = is_marked  # it began with a marker, or stands in a section
        self.was_read = False  # something followed the marker
        self.body: BodyReader | None = None  # what reads it, once it is known which

    def keep(self, text: str) -> None:
        self.raw.append(text)
        self.size += len(text)

    def forget(self) -> None:
        """A call of the body has ended."""
        self.raw, self.size, self.follows = [], 0, True

    @property
    def written(self) -> str:
        """The call as the model wrote it."""
        written = "".join(self.raw)
        return written.lstrip(_CLOSERS) if self.follows else written


class ToolParser:
    """Content, and calls as `fmt` declares them. Blanks next to a call are not content."""

    def __init__(
        self, fmt: ToolSyntax, tools: Sequence[ToolDef] = (), *, constrained: bool = False, begun: str = ""
    ) -> None:
        """`constrained`: what does not begin with a call is content to its end. `begun`: see ToolSyntax."""
        self._fmt, self._tools, self._constrained = fmt, tools, constrained
        self._searches = searches_of(fmt, tools)
        self._sink = CallSink(fmt.id_length)
        self._content = Content(self._sink, fmt)
        self._call: OpenCall | None = None
        self._state: Callable[[str, int, bool], int] = self._in_text
        self._held = ""  # the end of the text, which may begin a marker
        self._in_a_section = False
        self._at_start = constrained or self._searches.starts_bare  # nothing but blanks so far: a call may begin here
        self._is_first = bool(begun)  # `begun` was not read yet
        self._begun = begun  # as long as it is not decided what it begins
        self._num_broken = 0
        self._keep_close = False  # the close of a broken call is content

    @property
    def pending(self) -> int:
        """Characters that were fed and are not decided yet."""
        raw = self._call.size if self._call is not None else 0
        return max(0, len(self._held) + self._content.pending + raw - len(self._begun))

    def feed(self, text: str, ids: Sequence[int] = ()) -> list[ParseEvent]:
        if self._is_first and text:
            self._is_first, text = False, self._begun + text
        self._run(text, final=False)
        return self._sink.take()

    def flush(self) -> list[ParseEvent]:
        self._run("", final=True)
        if self._call is not None:
            self._break(self._call, "the output ended inside a tool call", ended=True)
        self._content.flush()
        return self._sink.take()

    def _run(self, text: str, final: bool) -> None:
        text, self._held = self._held + text, ""
        at = 0
        while at < len(text):
            at = self._state(text, at, final)

    def _hold(self, text: str, at: int) -> int:
        self._held = text[at:]
        return len(text)

    # Each state reads `text` from `at` and returns where the next state goes on.

    # -- outside of calls

    def _in_text(self, text: str, at: int, final: bool) -> int:
        if self._at_start and (reached := self._at_the_start(text, at, final)) is not None:
            return reached
        searches, trim = self._searches, self._fmt.trim
        begin, end, marker = searches.openers.find(text, at, final)
        if marker is None and trim and not final:
            begin = max(at, len(text[:begin].rstrip(BLANKS)), begin - MAX_GAP)
        content = text[at:begin]
        if marker is not None and trim and marker not in searches.dropped:
            content = content.rstrip(BLANKS)
        self._content.text(content)
        if marker is None:
            return self._hold(text, begin)
        return self._open(marker, begin, end)

    def _at_the_start(self, text: str, at: int, final: bool) -> int | None:
        """Where a bare body may come. None: what begins here is none, and `_in_text` reads on."""
        first = skip_blanks(text, at)
        found = self._searches.openers.at(text, at, final)
        if found is not None and found.marker is None:
            return self._hold(text, at)
        if found is None and first < len(text) and text[first] in self._searches.bare:
            self._content.text(text[at:first])
            return self._begin("", first)
        self._at_start = False
        if found is None and self._constrained:
            self._state = self._in_answer
            return at
        return None

    def _open(self, marker: str, begin: int, end: int) -> int:
        """What one of the openers begins."""
        fmt = self._fmt
        if marker not in fmt.open:
            self._begun = ""
        if marker in fmt.rearm:
            self._content.text(marker)
            self._at_start = True
        elif marker in fmt.section:
            self._in_a_section, self._state = True, self._in_section
        elif marker in fmt.open:
            return self._begin(marker, end)
        elif marker in fmt.opaque:
            self._content.text(marker)
            self._state = self._in_opaque
        elif marker not in self._searches.dropped:  # a bare body
            return self._begin("", begin)
        return end

    def _in_answer(self, text: str, at: int, final: bool) -> int:
        """The rest is content, whatever it looks like."""
        self._content.text(text[at:])
        return len(text)

    def _in_opaque(self, text: str, at: int, final: bool) -> int:
        begin, end, marker = self._searches.opaque_end.find(text, at, final)
        self._content.text(text[at : begin if marker is None else end])
        if marker is None:
            return self._hold(text, begin)
        self._state = self._in_text
        return end

    def _in_section(self, text: str, at: int, final: bool) -> int:
        """Between the calls of a section."""
        searches = self._searches
        if searches.begins_with_name:
            at = skip_blanks(text, at)
            if at == len(text):
                return at
            found = searches.in_section.at(text, at, final)
            if found is None:
                return self._begin("", at)
            begin, end, marker = found
        else:
            begin, end, marker = searches.in_section.find(text, at, final)
            self._content.between_calls(text[at:begin])
        if marker is None:
            return self._hold(text, begin)
        self._content.end_noise()
        if marker in self._fmt.open:
            return self._begin(marker, end)
        if marker in searches.firsts:
            return self._begin("", begin)
        if marker in self._fmt.section_close:
            self._in_a_section, self._state = False, self._in_text
        return end

    # -- inside of a call

    def _begin(self, marker: str, at: int) -> int:
        if marker.endswith(("{", "[")):
            marker, at = marker[:-1], at - 1
        self._call = OpenCall(self._content.take_gap(), marker, bool(marker) or self._in_a_section)
        self._at_start = False
        self._state = self._in_call
        return at

    def _in_call(self, text: str, at: int, final: bool) -> int:
        call = self._call
        assert call is not None
        if call.body is None:
            first = skip_blanks(text, at)
            call.keep(text[at:first])
            if first == len(text):
                return first
            call.was_read = True
            if (wrong := self._searches.wrong_at(text, first)) is not None:
                call.keep(text[first:wrong])
                self._break(call, "a tool call is malformed")
                return wrong
            call.body, at = self._reader(call, text[first]), first
        return self._read(call, call.body, text, at, final)

    def _read(self, call: OpenCall, body: BodyReader, text: str, at: int, final: bool) -> int:
        """The body reads on."""
        sink = self._sink
        num_calls, was_open = sink.num_calls, sink.open
        end = body.feed(text, at, final)
        call.keep(text[at:end])
        if sink.open:
            call.size = 0
        elif was_open or sink.num_calls > num_calls:
            call.forget()
        if body.state == "done":
            self._call, self._begun = None, ""
            self._state = self._after_call
        elif body.state == "bad":
            self._break(call, "a tool call is malformed")
        elif end == at:
            if not final:
                return self._hold(text, at)
            call.keep(text[at:])
            return len(text)
        return end

    def _reader(self, call: OpenCall, first: str) -> BodyReader:
        """The reader for the body that begins with this character."""
        ends = (*self._fmt.close, *self._fmt.section_close)
        strict_keys = self._fmt.bare == "anywhere" and not call.is_marked
        return self._searches.body(first).reader(self._sink, self._tools, ends, strict_keys=strict_keys)

    def _break(self, call: OpenCall, message: str, ended: bool = False) -> None:
        """The one rule for broken calls, see above."""
        raw, announced = "".join(call.raw), self._sink.open
        is_rest = self._sink.num_calls > 0 and not raw.strip(_CLOSERS)  # of a body whose calls are whole
        if announced and call.body is not None:
            rest = call.body.cut()
            self._sink.cut(call.written.removeprefix(self._begun).removesuffix(rest))
            raw = rest
        self._sink.drop()
        self._call = None
        only_marker = ended and call.is_marked and not call.was_read
        in_call = ended and not only_marker and not is_rest
        if announced or call.is_marked or (in_call and self._sink.num_calls):
            self._num_broken += 1
            if ended or self._num_broken <= _MAX_WARNINGS:
                self._sink.events.append(ParseWarning(message, raw if only_marker else "", in_call))
        raw, self._begun = raw.removeprefix(self._begun), ""
        if announced or not (only_marker or is_rest):
            self._content.text(raw)
        self._keep_close = not announced
        if self._searches.begins_with_name and not announced and not raw.strip(BLANKS):
            self._in_a_section = False  # nothing was read: it would be tried again
        self._state = self._in_raw if call.is_marked and self._fmt.close else self._outside()

    # -- behind a call

    def _outside(self) -> Callable[[str, int, bool], int]:
        """The state that follows a call."""
        if self._constrained and not self._sink.num_calls:
            return self._in_answer
        return self._in_section if self._in_a_section else self._in_text

    def _after_call(self, text: str, at: int, final: bool) -> int:
        """Blanks and `close`; anything else belongs to the next state."""
        found = self._searches.closes.at(text, at, final) if self._fmt.close else None
        if found is not None and found.marker is None:
            return self._hold(text, at)
        self._state = self._outside()
        return found.end if found else at

    def _in_raw(self, text: str, at: int, final: bool) -> int:
        """The rest of a broken call: content up to its close, which is shown if all of the call is."""
        begin, end, marker = self._searches.closes.find(text, at, final)
        self._content.text(text[at : end if marker and self._keep_close else begin])
        if marker is None:
            return self._hold(text, begin)
        self._state = self._outside()
        return end

"""The machine of tool calls: the text of one choice becomes content and tool calls. `feed` and `flush`, no torch.

    content --open--> tool --close--> content ...

One `ToolParser` runs every ToolFormat; bodies have readers of their own. Text that may begin a marker is
held back, at most one marker's length; nothing is scanned twice, so the work is linear in the text.

What breaks its format is handled by one rule. A call that was not announced is content, with its markers. A call that
was announced keeps the arguments it has, completed to valid JSON; the rest of it is content. A call that is cut off at
the end of the output counts as broken at that place; if there is nothing of it but its marker, that is dropped. Each
time a ParseWarning says so.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import lru_cache

from lmkit.api import ParseEvent, ParseWarning, ToolDef

from lmkit_formats.calls import BodyReader, CallSink, JsonCallReader, JsonCalls, NamedJson, NamedJsonReader
from lmkit_formats.looseobject import LooseObject, LooseObjectReader
from lmkit_formats.markers import BLANKS, MAX_GAP, markers, skip_blanks
from lmkit_formats.params import Params, ParamsReader
from lmkit_formats.pycalls import PyCalls, PyCallsReader
from lmkit_formats.syntax import ToolSyntax

# between "{" and the first key of a bare call
_GAPS = ("", " ", "\n", "\n ", "\n  ", "\n    ", "\n\t", "\r\n", "\r\n  ")
_MAX_WARNINGS = 100  # of broken calls in one output
_CLOSERS = BLANKS + ",]})"  # what may follow a finished call when the output ends early

_B = r"[ \t\r\n]*+"
# what follows a bracket is wrong, or a name is no text
_NO_OBJECT, _NO_LIST = rf'\{{{_B}(?=[^"}} \t\r\n])', rf"\[{_B}(?=[^{{\] \t\r\n])"
_NO_NAME = rf'\{{{_B}"(?:NAME)"{_B}:{_B}(?=[^" \t\r\n])'


class ToolParser:
    """Content, and calls as `fmt` declares them. Blanks next to a call are not content."""

    def __init__(
        self, fmt: ToolSyntax, tools: Sequence[ToolDef] = (), *, constrained: bool = False, begun: str = ""
    ) -> None:
        """`constrained`: what does not begin with a call is content to its end. `begun`: see ToolSyntax."""
        self._fmt, self._tools, self._constrained = fmt, tools, constrained
        self._bodies = fmt.body if isinstance(fmt.body, tuple) else (fmt.body,)
        json_bodies = [b for b in self._bodies if isinstance(b, JsonCalls)]
        self._only_json = len(json_bodies) == len(self._bodies)
        self._json_body = (*json_bodies, *self._bodies)[0]
        self._other_body = next((b for b in self._bodies if not isinstance(b, JsonCalls)), self._bodies[0])
        self._no_json = _no_call(self._json_body) if isinstance(self._json_body, JsonCalls) else None
        self._sink = CallSink(fmt.id_length)
        self._bare = "".join(_first_chars(b) for b in self._bodies) if fmt.bare else ""
        opens = fmt.open if fmt.loose or not fmt.section else ()
        bare = tuple(t for b in self._bodies for t in _bare_texts(b, tools)) if fmt.bare == "anywhere" else ()
        # a call that came without its section may be followed by the end of one
        self._dropped = (*fmt.drop, *(fmt.section_close if fmt.loose else ()))
        self._openers = markers(*opens, *fmt.section, *self._dropped, *fmt.rearm, *fmt.opaque[:1], *bare)
        self._opaque_end = markers(*fmt.opaque[1:])
        # bodies that follow each other in a section without `open` begin with a bracket or with a name
        is_named = any(isinstance(b, (NamedJson, Params, LooseObject)) for b in self._bodies)
        self._firsts = () if fmt.open or is_named else tuple("".join(map(_first_chars, self._bodies)))
        self._is_named = is_named and not fmt.open
        self._inner = markers(*fmt.open, *fmt.section, *fmt.section_close, *self._firsts)
        self._closes = markers(*fmt.close)
        self._state: Callable[[str, int, bool], int] = self._in_text
        self._in_a_section = False
        # nothing but blanks so far: a bare body may come
        self._at_start = constrained or (bool(fmt.bare) and not isinstance(self._json_body, JsonCalls))
        self._at_start |= fmt.bare == "start"
        self._is_first = bool(begun)
        self._begun = begun  # as long as it is not decided what it begins
        self._held = ""
        self._gap: str | None = ""  # blanks since the start or the last call; None once there was text
        self._raw: list[str] = []  # the call as written, until it is announced
        self._num_raw = 0  # its characters
        self._noise: list[str] = []  # text between the calls of a section, where it is dropped
        self._noisy = False  # there was such text since the last call
        self._marked = False  # the call began with a marker
        self._num_broken = 0
        self._was_read = False  # something followed the marker
        self._keep_close = False  # the close of a broken call is content
        self._body: BodyReader | None = None

    @property
    def pending(self) -> int:
        """Characters that were fed and are not decided yet."""
        return max(0, len(self._held) + len(self._gap or "") + self._num_raw - len(self._begun))

    def feed(self, text: str, ids: Sequence[int] = ()) -> list[ParseEvent]:
        if self._is_first and text:
            self._is_first, text = False, self._begun + text
        self._run(text, final=False)
        return self._sink.take()

    def flush(self) -> list[ParseEvent]:
        self._run("", final=True)
        if self._state == self._in_call:
            self._break("the output ended inside a tool call", ended=True)
        self._end_noise()
        if self._gap and not self._sink.num_calls:
            self._sink.text(self._gap)
        self._gap = None
        return self._sink.take()

    def _run(self, text: str, final: bool) -> None:
        text, self._held = self._held + text, ""
        at = 0
        while at < len(text):
            at = self._state(text, at, final)

    # Each state reads `text` from `at` and returns where the next state goes on.

    def _in_text(self, text: str, at: int, final: bool) -> int:
        if self._at_start:
            first = skip_blanks(text, at)
            found = self._openers.at(text, at, final)
            if found is not None and found.marker is None:
                return self._hold(text, at)
            if found is None and first < len(text) and text[first] in self._bare:
                self._text(text[at:first])
                return self._begin("", first)
            self._at_start = False
            if found is None and self._constrained:
                self._state = self._in_answer
                return at
        begin, end, marker = self._openers.find(text, at, final)
        if marker is None and self._fmt.trim and not final:
            begin = max(at, len(text[:begin].rstrip(BLANKS)), begin - MAX_GAP)
        content = text[at:begin]
        if marker is not None and self._fmt.trim and marker not in self._dropped:
            content = content.rstrip(BLANKS)
        self._text(content)
        if marker is None:
            return self._hold(text, begin)
        if marker not in self._fmt.open:
            self._begun = ""
        if marker in self._fmt.rearm:
            self._text(marker)
            self._at_start = True
        elif marker in self._fmt.section:
            self._in_a_section, self._state = True, self._in_section
        elif marker in self._fmt.open:
            return self._begin(marker, end)
        elif marker in self._fmt.opaque:
            self._text(marker)
            self._state = self._in_opaque
        elif marker not in self._dropped:  # a bare body
            return self._begin("", begin)
        return end

    def _in_answer(self, text: str, at: int, final: bool) -> int:
        """The rest is content, whatever it looks like."""
        self._text(text[at:])
        return len(text)

    def _in_opaque(self, text: str, at: int, final: bool) -> int:
        begin, end, marker = self._opaque_end.find(text, at, final)
        self._text(text[at : begin if marker is None else end])
        if marker is None:
            return self._hold(text, begin)
        self._state = self._in_text
        return end

    def _in_section(self, text: str, at: int, final: bool) -> int:
        """Between the calls of a section."""
        if self._is_named:
            at = skip_blanks(text, at)
            if at == len(text):
                return at
            found = self._inner.at(text, at, final)
            if found is None:
                return self._begin("", at)
            begin, end, marker = found
        else:
            begin, end, marker = self._inner.find(text, at, final)
            self._between(text[at:begin])
        if marker is None:
            return self._hold(text, begin)
        self._end_noise()
        if marker in self._fmt.open:
            return self._begin(marker, end)
        if marker in self._firsts:
            return self._begin("", begin)
        if marker in self._fmt.section_close:
            self._in_a_section, self._state = False, self._in_text
        return end

    def _between(self, text: str) -> None:
        """Text in a section, outside of its calls. Blanks before it belong to the section."""
        if not self._noisy:
            text = text.lstrip(BLANKS + self._fmt.separators)
            self._noisy = bool(text)
        if self._fmt.noise == "drop":
            self._noise.append(text)
        else:
            self._text(text)

    def _end_noise(self) -> None:
        if noise := "".join(self._noise):
            self._sink.events.append(ParseWarning("text between tool calls was dropped", noise))
        self._noise, self._noisy = [], False

    def _begin(self, marker: str, at: int) -> int:
        if marker.endswith(("{", "[")):
            marker, at = marker[:-1], at - 1
        # the blanks before it are content after all if this turns out to be no call
        self._raw, self._gap = [self._gap or "", marker], ""
        self._num_raw = len(self._raw[0]) + len(marker)
        self._marked = bool(marker) or self._in_a_section
        self._was_read = False
        self._body = None
        self._at_start = False
        self._state = self._in_call
        return at

    def _in_call(self, text: str, at: int, final: bool) -> int:
        body = self._body
        if body is None:
            first = skip_blanks(text, at)
            self._raw.append(text[at:first])
            self._num_raw += first - at
            at = first
            if at == len(text):
                return at
            if self._only_json and text[first] not in "{[":
                self._was_read = True
                self._break("a tool call is malformed")
                return at
            if self._only_json and self._no_json is not None and (wrong := self._no_json.match(text, first)):
                self._was_read = True
                self._raw.append(text[at : wrong.end()])
                self._break("a tool call is malformed")
                return wrong.end()
            body = self._body = self._reader(text[first])
            self._was_read = True
        num_calls, was_open = self._sink.num_calls, self._sink.open
        end = body.feed(text, at, final)
        if self._sink.num_calls > num_calls or was_open:
            self._raw, self._num_raw = [], 0
        else:
            self._raw.append(text[at:end])
            self._num_raw += end - at
        if body.state == "done":
            self._raw, self._num_raw, self._body, self._begun = [], 0, None, ""
            self._state = self._after_call
        elif body.state == "bad":
            self._break("a tool call is malformed")
        elif end == at:
            if final:
                self._raw.append(text[at:])
                self._num_raw += len(text) - at
                return len(text)
            return self._hold(text, at)
        return end

    def _reader(self, first: str) -> BodyReader:
        """The reader for the body that begins with this character."""
        body = self._json_body if first in ("{", "[") else self._other_body
        if isinstance(body, JsonCalls):
            return JsonCallReader(body, self._sink, strict_keys=self._fmt.bare == "anywhere" and not self._marked)
        if isinstance(body, NamedJson):
            return NamedJsonReader(body, self._sink)
        if isinstance(body, Params):
            return ParamsReader(body, self._sink, self._tools, (*self._fmt.close, *self._fmt.section_close))
        if isinstance(body, LooseObject):
            return LooseObjectReader(body, self._sink)
        return PyCallsReader(body, self._sink)

    def _break(self, message: str, ended: bool = False) -> None:
        """The one rule for broken calls, see above."""
        body, raw = self._body, "".join(self._raw)
        announced = self._sink.open
        if announced and body is not None:
            raw = body.leftover()
            self._sink.end(body.closing())
        only_marker = ended and self._marked and not self._was_read
        self._body, self._raw, self._num_raw = None, [], 0
        if announced or self._marked:
            self._num_broken += 1
            if only_marker or self._num_broken <= _MAX_WARNINGS:
                self._sink.events.append(ParseWarning(message, raw if only_marker else ""))
        raw, self._begun = raw.removeprefix(self._begun), ""
        if announced or not (only_marker or (self._sink.num_calls and not raw.strip(_CLOSERS))):
            self._text(raw)
        self._keep_close = not announced
        if self._is_named and not announced and not raw.strip(BLANKS):
            self._in_a_section = False  # nothing was read: it would be tried again
        self._state = self._in_raw if self._marked and self._fmt.close else self._leave()

    def _leave(self) -> Callable[[str, int, bool], int]:
        if self._constrained and not self._sink.num_calls:
            return self._in_answer
        return self._in_section if self._in_a_section else self._in_text

    def _after_call(self, text: str, at: int, final: bool) -> int:
        """Blanks and `close`; anything else belongs to the next state."""
        found = self._closes.at(text, at, final) if self._fmt.close else None
        if found is not None and found.marker is None:
            return self._hold(text, at)
        self._state = self._leave()
        return found.end if found else at

    def _in_raw(self, text: str, at: int, final: bool) -> int:
        """The rest of a broken call: content up to its close, which is shown if all of the call is."""
        begin, end, marker = self._closes.find(text, at, final)
        self._text(text[at : end if marker and self._keep_close else begin])
        if marker is None:
            return self._hold(text, begin)
        self._state = self._leave()
        return end

    def _text(self, text: str) -> None:
        if not text:
            return
        if self._gap is not None:
            gap = self._gap + text
            blank = BLANKS + self._fmt.separators if self._sink.num_calls else BLANKS
            if len(gap) <= MAX_GAP and not gap.strip(blank):
                self._gap = gap
                return
            self._gap, text = None, gap
        self._sink.text(text)

    def _hold(self, text: str, at: int) -> int:
        self._held = text[at:]
        return len(text)


def _bare_texts(body: object, tools: Sequence[ToolDef]) -> tuple[str, ...]:
    """How a body may begin in the middle of text: with a key of a call or a tool's name, not with just any bracket."""
    if isinstance(body, PyCalls):
        return tuple(f"[{gap}{tool.name}(" for gap in _GAPS for tool in tools)
    if not isinstance(body, JsonCalls) or body.keyed:
        return tuple(_first_chars(body))
    brackets = {"one": ("{",), "list": ("[{",), "any": ("{", "[{")}[body.many]
    keys = (*body.name, *body.arguments, *body.id, "type")
    return tuple(f'{b}{gap}"{key}"' for b in brackets for gap in _GAPS for key in keys)


@lru_cache(maxsize=256)
def _no_call(body: JsonCalls) -> re.Pattern[str]:
    """How a body begins that is wrong from its start, up to the place where a reader would find that out."""
    first = _first_chars(body)
    name = _NO_NAME.replace("NAME", "|".join(map(re.escape, body.name)))
    wrong = [_NO_OBJECT if "{" in first else "", _NO_LIST if "[" in first else ""]
    return re.compile("|".join(filter(None, [*wrong, name if "{" in first and not body.keyed else ""])))


def _first_chars(body: object) -> str:
    if isinstance(body, JsonCalls):
        return {"one": "{", "list": "[", "any": "{["}[body.many]
    return "["

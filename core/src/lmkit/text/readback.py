"""Which formats read what a chat template shows: an earlier call and earlier reasoning, rendered and parsed again.

A template is written for what its model writes, so a format that cannot read it is not the model's. No torch.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from lmkit.api import (
    ChatRenderer,
    ConfigError,
    DeclaredFormat,
    LmkitError,
    Reasoning,
    ResolvedPlan,
    Text,
    ToolArgs,
    ToolCut,
    ToolDef,
    ToolStart,
)
from lmkit.prompts import shown
from lmkit.text.formats import AnyFormat, start_parser
from lmkit.text.renderer import open_renderer

NAME = "get_weather"
TOOL = ToolDef(NAME, "Weather of a city", {
    "type": "object", "required": ["city"],
    "properties": {  # some templates cannot do without descriptions
        "city": {"type": "string", "description": "Name"}, "days": {"type": "integer", "description": "Number of days"},
    },
})  # fmt: skip
# The second is what templates show well that write Python's spelling of an object
_ARGUMENTS = ('{"city": "Paris", "days": 3}', "{}")
_THOUGHT, _ANSWER = "lmkitthought", "lmkitanswer"
_USER = {"role": "user", "content": "Hello"}
_KEYS = ("reasoning_content", "reasoning", "thinking")
_TAIL = 256  # characters of the prompt that parsers look at
_MAX_MARKER = 64  # characters of a marker that may have begun at the end of a common beginning
_TAG = re.compile(r"<[^<>\n]+>|\[[^][\n]+\]")  # looks like a marker


@dataclass(frozen=True)
class Shown:
    """The text that a template writes after the beginning of a prompt, with a call's arguments or reasoning in it."""

    kind: str
    begin: str
    written: str
    arguments: str = ""
    is_prompt: bool = False  # `begin` is a whole prompt: an output goes on there, even within a marker

    def left_by(self, fmt: AnyFormat) -> int | None:
        """Characters that `fmt` takes for content; None when it does not read what is in it."""
        text, at = self.begin + self.written, len(self.begin)
        if not self.is_prompt:
            at = before_marker(text, at, fmt.keep_special)
        parser = start_parser(fmt, text[max(0, at - _TAIL) : at], (TOOL,))
        events = [*parser.feed(text[at:]), *parser.flush()]
        content = "".join(e.text for e in events if isinstance(e, Text)).strip()
        if self.kind == "reasoning_parser":
            thought = "".join(e.text for e in events if isinstance(e, Reasoning)).strip()
            return len(content) if thought == _THOUGHT and _ANSWER in content else None
        if any(isinstance(e, ToolCut) for e in events):
            return None
        names = [e.name for e in events if isinstance(e, ToolStart)]
        arguments = "".join(e.json_fragment for e in events if isinstance(e, ToolArgs))
        is_same = names == [NAME] and json.loads(arguments) == json.loads(self.arguments)
        return len(content) if is_same else None


class Readback:
    """What one template shows."""

    def __init__(self, renderer: ChatRenderer | None) -> None:
        self._renderer = renderer

    @classmethod
    def of(cls, plan: ResolvedPlan, templates: Mapping[str, str], special: Mapping[str, str]) -> Readback:
        """`plan`: as far as the renderer; `templates`: by name, as in lmkit.files; `special`: variables with special
        tokens."""
        source = templates.get("default")
        try:
            if not source:
                return cls(None)
            return cls(open_renderer(plan, source, special, tools_source=templates.get("tool_use")))
        except ConfigError:  # whoever renders will say so
            return cls(None)

    def readers(
        self, kind: str, chosen: str | None, names: Iterable[str], load: Callable[[str], AnyFormat]
    ) -> tuple[str, ...] | None:
        """Names of the formats that read best what the template shows, simple ones first; None when none does, or it
        shows nothing. When `chosen` reads it without a rest, the others are not looked at; code of formats that are
        no declaration runs only when it is chosen."""
        for case in self._calls() if kind == "tool_parser" else self._reasoning():
            rest = len(_ANSWER) if case.kind == "reasoning_parser" else 0
            if chosen is not None and _left(case, load, chosen, runs=True)[0] == rest:
                return (chosen,)
            found = {name: _left(case, load, name, runs=name == chosen) for name in names}
            read = {name: left for name, left in found.items() if left[0] is not None}
            least = min((left[0] or 0 for left in read.values()), default=0)
            if best := [name for name, left in read.items() if left[0] == least]:
                return tuple(sorted(best, key=lambda name: (read[name][1], name)))
        return None

    def _calls(self) -> Iterable[Shown]:
        function = {"name": NAME, "description": TOOL.description, "parameters": TOOL.parameters}
        tools = [{"type": "function", "function": function}]
        plain = self._render([_USER, {"role": "assistant", "content": _ANSWER}], tools)
        prompt = self._render([_USER], tools, add_generation_prompt=True)
        for arguments in _ARGUMENTS:
            call = {"id": "123456789", "type": "function", "function": {"name": NAME, "arguments": arguments}}
            text = self._render([_USER, {"role": "assistant", "content": "", "tool_calls": [call]}], tools)
            at = max(goes_on(text, rendered) for rendered in (plain, prompt))
            if NAME in text[at:]:
                written = _without(text[at:], plain)
                yield Shown("tool_parser", text[:at], written, arguments, is_prompt=text[:at] == prompt)

    def _reasoning(self) -> Iterable[Shown]:
        prompt = self._render([_USER], add_generation_prompt=True)
        for key in _KEYS:
            text = self._render([_USER, {"role": "assistant", key: _THOUGHT, "content": _ANSWER}])
            at = goes_on(text, prompt)
            written = _without(text[at:], text)
            if _THOUGHT in written and _ANSWER in written:
                for begin in dict.fromkeys((text[:at], prompt)):
                    yield Shown("reasoning_parser", begin, written, is_prompt=begin == prompt)
                return

    def _render(self, messages: Any, tools: Any = (), *, add_generation_prompt: bool = False) -> str:
        """ "" when the template refuses."""
        if self._renderer is None:
            return ""
        try:
            return shown(self._renderer.render(messages, tools, add_generation_prompt=add_generation_prompt))
        except LmkitError:
            return ""


def goes_on(text: str, prompt: str) -> int:
    """Where `text`, a longer conversation, goes on otherwise than `prompt` does, but not within a marker: a prompt that
    ends in <think> and a history with <tool_call> part before the "<", and not behind the "<t".
    """
    at = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(text, prompt, strict=False)))
    return at if at == len(prompt) else before_marker(text, at)


def before_marker(text: str, at: int, markers: Iterable[str] = ()) -> int:
    """The beginning of the first marker that `at` would cut in two: of one of `markers` or a tag; `at` otherwise."""
    start = max(0, at - _MAX_MARKER)
    around = text[start : at + _MAX_MARKER]
    starts = [m.start() for m in _TAG.finditer(around) if m.start() < at - start < m.end()]
    for marker in markers:
        for num_before in range(1, len(marker)):
            if num_before <= at and text.startswith(marker, at - num_before):
                starts.append(at - start - num_before)
    return start + min(starts) if starts else at


def _without(text: str, plain: str) -> str:
    """`text` without the end that an answer in `plain` has too, or the part of it from some marker on."""
    _, found, end = plain.rpartition(_ANSWER)
    if not found:
        return text
    pairs = zip(reversed(text), reversed(end), strict=False)
    num_common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    at = len(text) - num_common
    if num_common < len(end):  # whole markers only
        match = _TAG.search(text, at)
        at = len(text) if match is None else match.start()
        if before_marker(text, at) < at:
            at = len(text)
    return text[:at]


def _left(case: Shown, load: Callable[[str], AnyFormat], name: str, *, runs: bool) -> tuple[int | None, int]:
    """(see Shown.left_by, number of markers); a format that raises does not read, nor does code without `runs`."""
    try:
        fmt = load(name)
        if not runs and not isinstance(fmt, DeclaredFormat):
            return None, 0
        return case.left_by(fmt), len(fmt.keep_special)
    except Exception:
        return None, 0

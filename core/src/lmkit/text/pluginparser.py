"""Parsers that are a plugin's own code (lmkit.api.ParserFormat): what they return is checked, no text gets lost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lmkit.api import (
    ParseEvent,
    ParserFormat,
    ParseWarning,
    PluginError,
    Reasoning,
    StreamParser,
    Text,
    ToolArgs,
    ToolDef,
    ToolEnd,
    ToolStart,
)
from lmkit.plugins.refs import call

_EVENTS = (Text, Reasoning, ToolStart, ToolArgs, ToolEnd, ParseWarning)
_NAMES = ", ".join(kind.__name__ for kind in _EVENTS)


class PluginParser:
    """Raises PluginError, which names the parser, for anything that is no list of events. What it raises passes."""

    def __init__(self, fmt: ParserFormat, prompt_tail: str, tools: Sequence[ToolDef]) -> None:
        self._owner = f"parser {getattr(fmt, 'name', type(fmt).__name__)!r}"
        start = getattr(fmt, "start", None)
        if not callable(start):
            raise PluginError(
                f"{self._owner} is a {type(fmt).__name__}, which is no format",
                fix="its target must be a ParserFormat of lmkit.api, or a declaration of lmkit_formats",
            )
        self._parser: StreamParser = call(self._owner, start, prompt_tail, tools)
        if not (callable(getattr(self._parser, "feed", None)) and callable(getattr(self._parser, "flush", None))):
            raise self._wrong("start", self._parser, "an object with feed and flush")

    def __getattr__(self, name: str) -> Any:
        """`inside` and `pending` are there if the plugin's parser has them."""
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._parser, name)

    def feed(self, text: str, ids: Sequence[int] = ()) -> list[ParseEvent]:
        return self._checked("feed", self._parser.feed(text, ids))

    def flush(self) -> list[ParseEvent]:
        return self._checked("flush", self._parser.flush())

    def _checked(self, method: str, events: object) -> list[ParseEvent]:
        if not isinstance(events, (list, tuple)):
            raise self._wrong(method, events, "a list of events")
        for event in events:
            if not isinstance(event, _EVENTS):
                raise self._wrong(method, event, f"events ({_NAMES})")
            if isinstance(event, (Text, Reasoning)) and not isinstance(event.text, str):
                raise self._wrong(method, event, "events whose text is a str")
        return list(events)

    def _wrong(self, method: str, returned: object, needed: str) -> PluginError:
        return PluginError(
            f"{self._owner}: {method} gave {returned!r:.80}, where lmkit needs {needed}",
            fix="correct the plugin, or start with another parser (none is possible too)",
        )

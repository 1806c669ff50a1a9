"""Parsers that are a plugin's own code (lmkit.api.ParserFormat): what they return is checked, no text gets lost."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
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
    ToolCut,
    ToolDef,
    ToolEnd,
    ToolStart,
    guard,
)

log = logging.getLogger("lmkit.plugins")
_EVENTS = (Text, Reasoning, ToolStart, ToolArgs, ToolEnd, ToolCut, ParseWarning)
_NAMES = ", ".join(kind.__name__ for kind in _EVENTS)


class PluginParser:
    """Raises PluginError, which names the parser, where it raises or gives anything that is no list of events."""

    def __init__(self, fmt: ParserFormat, prompt_tail: str, tools: Sequence[ToolDef], owner: str = "") -> None:
        self._owner = owner or f"parser {getattr(fmt, 'name', type(fmt).__name__)!r}"
        self._parser: StreamParser = _call(self._owner, "start", fmt.start, prompt_tail, tools)
        if not (callable(getattr(self._parser, "feed", None)) and callable(getattr(self._parser, "flush", None))):
            raise self._wrong("start", self._parser, "an object with feed and flush")
        self._unseen: str | None = ""  # what was fed, until an event comes
        self._arguments: list[str] = []  # of the open call

    def __getattr__(self, name: str) -> Any:
        """`inside` and `pending` are there if the plugin's parser has them."""
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._parser, name)

    def feed(self, text: str, ids: Sequence[int] = ()) -> list[ParseEvent]:
        events = self._checked("feed", _call(self._owner, "feed", self._parser.feed, text, ids))
        self._unseen = None if events or self._unseen is None else self._unseen + text
        return events

    def flush(self) -> list[ParseEvent]:
        events = self._checked("flush", _call(self._owner, "flush", self._parser.flush))
        if not events and self._unseen and self._unseen.strip():
            log.warning("%s made nothing of an output of %d characters", self._owner, len(self._unseen))
            return [ParseWarning(f"{self._owner} made nothing of this output", self._unseen)]
        return events

    def _checked(self, method: str, events: object) -> list[ParseEvent]:
        if not isinstance(events, (list, tuple)):
            raise self._wrong(method, events, "a list of events")
        for event in events:
            if not isinstance(event, _EVENTS):
                raise self._wrong(method, event, f"events ({_NAMES})")
            if isinstance(event, (Text, Reasoning)) and not isinstance(event.text, str):
                raise self._wrong(method, event, "events whose text is a str")
        return [self._counted(event) for event in events]

    def _counted(self, event: ParseEvent) -> ParseEvent:
        """The event; a call that ends with arguments that are no JSON object was cut, whatever the parser says."""
        if isinstance(event, ToolStart):
            self._arguments = []
        elif isinstance(event, ToolArgs):
            self._arguments.append(event.json_fragment)
        elif isinstance(event, ToolEnd) and not _is_object("".join(self._arguments)):
            log.warning("%s ended a call whose arguments are no JSON object", self._owner)
            return ToolCut(event.index)
        return event

    def _wrong(self, method: str, returned: object, needed: str) -> PluginError:
        return PluginError(
            f"{self._owner}: {method} gave {returned!r:.80}, where lmkit needs {needed}",
            fix="correct the plugin, or start with another parser (none is possible too)",
        )


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


def _call(owner: str, method: str, function: Callable[..., Any], *args: Any) -> Any:
    """Clients hear whose fault it is, and not what it said: that is for the log."""
    with guard(owner, method):
        return function(*args)

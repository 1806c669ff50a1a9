"""Reasoning that stays in the content: clients that send messages back as they got them need the opening tag too."""

from __future__ import annotations

from collections.abc import Sequence

from lmkit.api import Grammar, ParseEvent, StreamParser, Text, ToolChoice, ToolDef

OPEN = "<think>"


class AppendThink:
    """The tag that the prompt has opened is the beginning of the content."""

    name = "minimax_m2_append_think"
    keep_special = frozenset((OPEN, "</think>"))

    def start(self, prompt_tail: str, tools: Sequence[ToolDef]) -> StreamParser:
        is_opened = not prompt_tail or prompt_tail.rstrip().endswith(OPEN)
        return Prefixed(OPEN if is_opened else "")

    def grammar(self, tools: Sequence[ToolDef], choice: ToolChoice) -> Grammar | None:
        return None


class Prefixed:
    """All text is content, after `prefix`."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix

    def feed(self, text: str, ids: Sequence[int] = ()) -> list[ParseEvent]:
        text, self._prefix = self._prefix + text, ""
        return [Text(text)] if text else []

    def flush(self) -> list[ParseEvent]:
        return self.feed("")


APPEND_THINK = AppendThink()

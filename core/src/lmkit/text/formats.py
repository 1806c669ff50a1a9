"""Formats of tool calls and of reasoning: found by name, started as parsers, run one after another. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from lmkit.api import DeclaredFormat, ParseEvent, ParserFormat, PluginError, StreamParser, Text, ToolDef
from lmkit.plugins import load_ref
from lmkit.plugins.refs import ask
from lmkit.text.pluginparser import PluginParser

if TYPE_CHECKING:
    from lmkit.plugins.host import PluginHost

AnyFormat = DeclaredFormat | ParserFormat


def load_format(host: PluginHost, kind: str, name: str) -> AnyFormat:
    """`kind`: tool_parser or reasoning_parser. Raises PluginError with the reason when it cannot be used."""
    return made_format(f"{kind} {name!r}", load_ref(host.load(kind, name).target, f"{kind} {name!r}"))


def made_format(owner: str, target: Any, **options: Any) -> AnyFormat:
    """A format from what a plugin's target names. Raises PluginError for anything else."""
    made: AnyFormat = ask(owner, partial(target, **options)) if isinstance(target, type) else target
    lacks = [name for name in ("name", "keep_special", "start", "grammar") if not hasattr(made, name)]
    if lacks and not isinstance(made, DeclaredFormat):
        raise PluginError(
            f"{owner} is a {type(made).__name__} without {', '.join(lacks)}, which is no format",
            fix="its target must be a ParserFormat of lmkit.api, or a declaration of lmkit_formats",
        )
    return made


def in_order(*formats: AnyFormat | None) -> list[AnyFormat]:
    """Those that run one after another: a format that reads everything runs alone."""
    given = [fmt for fmt in formats if fmt is not None]
    return [fmt for fmt in given if isinstance(fmt, DeclaredFormat) and fmt.whole] or given


def start_parser(
    fmt: AnyFormat,
    prompt_tail: str | None,
    tools: Sequence[ToolDef] = (),
    template_kwargs: Mapping[str, object] | None = None,
    *,
    constrained: bool = False,
    owner: str = "",
) -> StreamParser:
    """A parser for one choice, see `DeclaredFormat.build`. Raises PluginError for a plugin's parser that cannot be
    started. `owner`: how errors name the plugin.
    """
    if isinstance(fmt, DeclaredFormat):
        return fmt.build(prompt_tail, tools, template_kwargs or {}, constrained=constrained)
    return PluginParser(fmt, prompt_tail or "", tools, owner)


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

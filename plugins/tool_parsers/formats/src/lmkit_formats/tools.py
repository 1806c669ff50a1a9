"""ToolFormat: what a plugin declares of a family's tool calls, and everything that is derived from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lmkit.api import DeclaredFormat, StreamParser, ToolDef

from lmkit_formats.derive import calls_format, free_format, render
from lmkit_formats.parsing import ToolParser
from lmkit_formats.syntax import ToolSyntax
from lmkit_formats.tags import Calls, Tag


@dataclass(frozen=True, slots=True)
class ToolFormat(ToolSyntax, DeclaredFormat):
    """How a family writes tool calls: the fields of ToolSyntax. A plugin ships this data and no code."""

    def build(
        self, prompt_tail: str | None, tools: Sequence[ToolDef], template_kwargs: Mapping[str, object], *,
        constrained: bool,
    ) -> StreamParser:  # fmt: skip
        begun = not self.begun or not prompt_tail or prompt_tail.rstrip().endswith(self.begun)
        return ToolParser(self, tools, constrained=constrained, begun=self.begun if begun else "")

    def tag(self, tools: Sequence[ToolDef], *, free: bool, parallel: bool) -> Tag | None:
        return free_format(self, tools, parallel) if free else calls_format(self, tools, parallel)

    def write(self, calls: Calls, tools: Sequence[ToolDef] = ()) -> str:
        return render(self, calls, tools)

    @property
    def openers(self) -> tuple[str, ...]:
        return tuple(text for text in (*self.section, *self.open) if text)

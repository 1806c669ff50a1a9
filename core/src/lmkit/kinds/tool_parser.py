"""How a model family writes tool calls. `models` and `markers` let `auto` find the format.

Example, entry point `[project.entry-points."lmkit.tool_parser"] toy = "toy_parser.hooks"`::

    from lmkit.api import ToolParserSpec, hookimpl


    @hookimpl
    def lmkit_tool_parsers():
        yield ToolParserSpec(
            name="toy", summary="<call>{...}</call>", target="toy_parser.formats:TOY",
            models=("Toy*",), markers=("<call>",),
        )
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from lmkit.kinds.base import Kind
from lmkit.kinds.parsers import ParserRequest, ParserSpec, ask, auto_refusals, claim


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolParserSpec(ParserSpec):
    """target: a DeclaredFormat (lmkit_formats.ToolFormat), or a ParserFormat instance or class."""


KIND = Kind(
    "tool_parser",
    spec=ToolParserSpec,
    hook="lmkit_tool_parsers",
    used_by="lmkit.text.side",
    request=ParserRequest,
    auto_refusals=auto_refusals,
    claim=claim,
    needs=("template", "platform"),
    ask=partial(ask, "tool_parser"),
    takes="offered",
    setting="tool_parser",
    words="auto, none or a tool parser's name",
    doc=__doc__,
)

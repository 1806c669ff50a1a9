"""How a model family marks its reasoning.

Example, entry point `[project.entry-points."lmkit.reasoning_parser"] toy = "toy_parser.hooks"`::

    from lmkit.api import ReasoningParserSpec, hookimpl


    @hookimpl
    def lmkit_reasoning_parsers():
        yield ReasoningParserSpec(
            name="toy", summary="<mull>...</mull>", target="toy_parser.formats:MULL", markers=("<mull>",),
        )
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from lmkit.kinds.base import Kind
from lmkit.kinds.parsers import ParserRequest, ParserSpec, ask, auto_refusals, claim


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningParserSpec(ParserSpec):
    """target: a DeclaredFormat (lmkit_formats.ReasoningFormat), or a ParserFormat instance or class."""


KIND = Kind(
    "reasoning_parser",
    spec=ReasoningParserSpec,
    hook="lmkit_reasoning_parsers",
    used_by="lmkit.text.side",
    request=ParserRequest,
    auto_refusals=auto_refusals,
    claim=claim,
    needs=("template", "platform"),
    ask=partial(ask, "reasoning_parser"),
    takes="offered",
    setting="reasoning_parser",
    words="auto, none or a reasoning parser's name",
    doc=__doc__,
)

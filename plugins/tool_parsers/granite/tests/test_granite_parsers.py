"""The formats of this plugin read what they declare, whole and split, and survive what is broken."""

from lmkit_testing import ReasoningParserConformance, ToolParserConformance


class TestGranite(ToolParserConformance):
    plugin = "tool_parser:granite"


class TestGranite4(ToolParserConformance):
    plugin = "tool_parser:granite4"


class TestGranite20bFc(ToolParserConformance):
    plugin = "tool_parser:granite-20b-fc"


class TestGraniteReasoning(ReasoningParserConformance):
    plugin = "reasoning_parser:granite"
    samples = ("Here is my thought process: a Here is my response: b",)

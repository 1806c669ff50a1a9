"""The formats of this plugin read what they declare, whole and split, and survive what is broken."""

from lmkit.testing import ReasoningParserConformance, ToolParserConformance


class TestMistral(ToolParserConformance):
    plugin = "tool_parser:mistral"


class TestMistralReasoning(ReasoningParserConformance):
    plugin = "reasoning_parser:mistral"
    samples = ("[THINK]a[/THINK]b",)

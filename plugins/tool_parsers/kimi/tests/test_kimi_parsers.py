"""The formats of this plugin read what they declare, whole and split, and survive what is broken."""

from lmkit.testing import ReasoningParserConformance, ToolParserConformance


class TestKimiK2(ToolParserConformance):
    plugin = "tool_parser:kimi_k2"


class TestKimiK2Reasoning(ReasoningParserConformance):
    plugin = "reasoning_parser:kimi_k2"
    samples = ("<think>a</think>b", "<think>a")
    prompt_tails = ("", "<think>\n")

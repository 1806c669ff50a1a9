"""The formats of this plugin read what they declare, whole and split, and survive what is broken."""

from lmkit_testing import ReasoningParserConformance, ToolParserConformance


class TestQwen3Json(ToolParserConformance):
    plugin = "tool_parser:qwen3_json"


class TestQwen3Reasoning(ReasoningParserConformance):
    plugin = "reasoning_parser:qwen3"
    samples = ("<think>a</think>b", "<think>a")
    prompt_tails = ("", "<think>\n")

"""The formats of this plugin read what they declare, whole and split, and survive what is broken."""

from lmkit_testing import ReasoningParserConformance, ToolParserConformance


class TestHunyuanA13b(ToolParserConformance):
    plugin = "tool_parser:hunyuan_a13b"


class TestHyV3(ToolParserConformance):
    plugin = "tool_parser:hy_v3"


class TestHunyuanA13bReasoning(ReasoningParserConformance):
    plugin = "reasoning_parser:hunyuan_a13b"
    samples = ("<think>\na\n</think>\n<answer>\nb\n</answer>",)
    prompt_tails = ("", "<think>\n")


class TestHyV3Reasoning(ReasoningParserConformance):
    plugin = "reasoning_parser:hy_v3"
    samples = ("<think>a</think>b", "<think>a")
    prompt_tails = ("", "<think>\n")


class TestHyV4(ToolParserConformance):
    plugin = "tool_parser:hy_v4"


class TestHyV4Reasoning(ReasoningParserConformance):
    plugin = "reasoning_parser:hy_v4"
    samples = ("<think:opensource>a</think:opensource>b",)

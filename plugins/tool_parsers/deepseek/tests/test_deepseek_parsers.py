"""The formats of this plugin read what they declare, whole and split, and survive what is broken."""

from lmkit.testing import ReasoningParserConformance, ToolParserConformance


class TestDeepseekV3(ToolParserConformance):
    plugin = "tool_parser:deepseek_v3"


class TestDeepseekV31(ToolParserConformance):
    plugin = "tool_parser:deepseek_v31"


class TestDeepseekV32(ToolParserConformance):
    plugin = "tool_parser:deepseek_v32"


class TestDeepseekV4(ToolParserConformance):
    plugin = "tool_parser:deepseek_v4"


class TestDeepseekV41(ToolParserConformance):
    plugin = "tool_parser:deepseek_v41"


class TestDeepseekR1Reasoning(ReasoningParserConformance):
    plugin = "reasoning_parser:deepseek_r1"
    samples = ("<think>a</think>b", "<think>a")
    prompt_tails = ("", "<think>\n")


class TestDeepseekV3Reasoning(ReasoningParserConformance):
    plugin = "reasoning_parser:deepseek_v3"
    samples = ("<think>a</think>b", "<think>a")
    prompt_tails = ("", "<think>\n")


class TestDeepseekV31Reasoning(ReasoningParserConformance):
    plugin = "reasoning_parser:deepseek_v31"
    samples = ("<think>a</think>b", "<think>a")
    prompt_tails = ("", "<think>\n")

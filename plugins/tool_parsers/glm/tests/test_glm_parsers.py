"""GLM: conformance of the formats; the recorded outputs are in tests/parsers."""

from __future__ import annotations

from lmkit_testing import ReasoningParserConformance, ToolParserConformance


class TestGlm45(ToolParserConformance):
    plugin = "tool_parser:glm45"
    samples = (
        (
            "So:\n<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n<arg_key>b</arg_key>\n<"
            'arg_value>x < "y"</arg_value>\n</tool_call>\n<tool_call>f\n<arg_key>a</arg_key>\n<arg_val'
            'ue>1</arg_value>\n<arg_key>b</arg_key>\n<arg_value>x < "y"</arg_value>\n</tool_call>'
        ),
        "<tool_call>f</tool_call>",
        "<tool_call></tool_call>",
        "<tool_call>f<arg_key>a</arg_key>oops</tool_call>",
    )


class TestGlm47(ToolParserConformance):
    plugin = "tool_parser:glm47"
    samples = (
        (
            "<tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value><arg_key>b</arg_key><arg_valu"
            'e>x < "y"</arg_value></tool_call>'
        ),
        "<tool_call>f</tool_call>",
    )


class TestGlm45Reasoning(ReasoningParserConformance):
    plugin = "reasoning_parser:glm45"
    samples = (
        "<think>a</think>b",
        "\n<think>\na\n</think>\n\nb",
        "a</think>b",
        "<think>a<tool_call>b",
    )

"""MiniMax: conformance of the formats; the recorded outputs are in tests/parsers."""

from __future__ import annotations

from lmkit_testing import ReasoningParserConformance, ToolParserConformance


class TestMinimax(ToolParserConformance):
    plugin = "tool_parser:minimax"
    samples = (
        ('<tool_calls>\n{"name": "f", "arguments": {"a": 1}}\n{"name": "g", "arguments": {}}\n</tool_calls>'),
        '<tool_calls>\n{"name": "f", "arguments": {"a": 1}}\n{oops}\n</tool_calls> x',
        "<tool_calls>oops</tool_calls>",
    )


class TestMinimaxM2(ToolParserConformance):
    plugin = "tool_parser:minimax_m2"
    samples = (
        (
            '<minimax:tool_call>\n<invoke name="f">\n<parameter name="a">1</parameter>\n<parameter na'
            'me="b">x < y</parameter>\n</invoke>\n</minimax:tool_call>'
        ),
        '<minimax:tool_call>\n<invoke name="f">\n<parameter name="a">1</parameter',
        (
            '<minimax:tool_call>\n<invoke name="f">\n<parameter name="a">1\n<parameter name="b">x < y'
            "\n</invoke>\n</minimax:tool_call>"
        ),
    )


class TestMinimaxM2Reasoning(ReasoningParserConformance):
    plugin = "reasoning_parser:minimax_m2"
    samples = (
        "<think>a</think>b",
        "\n<think>\na\n</think>\n\nb",
        "a</think>b",
    )


class TestMinimaxM2AppendThinkReasoning(ReasoningParserConformance):
    plugin = "reasoning_parser:minimax_m2_append_think"
    samples = ("a</think>b",)
    skip = {"test_text_without_markers_is_content": "the content begins with <think>, which the prompt has opened"}

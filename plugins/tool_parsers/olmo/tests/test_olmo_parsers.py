"""Olmo: conformance of the formats; the recorded outputs are in tests/parsers."""

from __future__ import annotations

from lmkit_testing import ReasoningParserConformance, ToolParserConformance


class TestOlmo3(ToolParserConformance):
    plugin = "tool_parser:olmo3"
    samples = (
        '<function_calls>f(a=1, b="x, (y)", c=[1, {"d": None}])\ng()</function_calls>',
        "<function_calls>f(a=1, b=",
        "<function_calls>f(a=null)</function_calls> x",
    )


class TestOlmo3Reasoning(ReasoningParserConformance):
    plugin = "reasoning_parser:olmo3"
    samples = (
        "<think>a</think>b",
        "\n<think>\na\n</think>\n\nb",
        "a</think>b",
    )

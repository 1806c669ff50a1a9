"""MiMo: conformance of the formats; the recorded outputs are in tests/parsers."""

from __future__ import annotations

from lmkit.testing import ReasoningParserConformance, ToolParserConformance


class TestMimo(ToolParserConformance):
    plugin = "tool_parser:mimo"
    samples = (
        (
            "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\nx < y\nz\n</paramet"
            "er>\n</function>\n</tool_call>"
        ),
    )


class TestMimoReasoning(ReasoningParserConformance):
    plugin = "reasoning_parser:mimo"
    samples = (
        "<think>a</think>b",
        "\n<think>\na\n</think>\n\nb",
        "a</think>b",
        "<think>a<tool_call>b",
    )

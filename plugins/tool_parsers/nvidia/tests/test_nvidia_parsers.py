"""Nemotron: conformance of the formats; the recorded outputs are in tests/parsers."""

from __future__ import annotations

from lmkit_testing import ReasoningParserConformance, ToolParserConformance


class TestNemotronV3Reasoning(ReasoningParserConformance):
    plugin = "reasoning_parser:nemotron_v3"
    samples = (
        "<think>a</think>b",
        "\n<think>\na\n</think>\n\nb",
        "a</think>b",
        "<think>a<tool_call>b",
    )


class TestNemotronV2(ToolParserConformance):
    plugin = "tool_parser:nemotron_v2"
    samples = ('So <TOOLCALL>[{"name": "f", "arguments": {"a": 1}}, {"name": "f", "arguments": "{}"}]</TOOLCALL>',)

"""LFM: conformance of the formats; the recorded outputs are in tests/parsers."""

from __future__ import annotations

from lmkit_testing import ToolParserConformance


class TestLfm2(ToolParserConformance):
    plugin = "tool_parser:lfm2"
    samples = (
        '<|tool_call_start|>[f(a=1, b="x, (y)", c=[1, {"d": None}]), g()]<|tool_call_end|>',
        "<|tool_call_start|>[f(a=",
        "<|tool_call_start|>oops<|tool_call_end|>",
    )

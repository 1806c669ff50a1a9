"""Seed-OSS: conformance of the formats; the recorded outputs are in tests/parsers."""

from __future__ import annotations

from lmkit_testing import ReasoningParserConformance, ToolParserConformance


class TestSeedOss(ToolParserConformance):
    plugin = "tool_parser:seed_oss"
    samples = (
        (
            "<seed:tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\nx < y\nz\n</pa"
            "rameter>\n</function>\n</seed:tool_call>"
        ),
        "<seed:tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n<",
    )


class TestSeedOssReasoning(ReasoningParserConformance):
    plugin = "reasoning_parser:seed_oss"
    samples = (
        "<seed:think>a</seed:think>b",
        "\n<seed:think>\na\n</seed:think>\n\nb",
        "a</seed:think>b",
        "<seed:think>a<seed:tool_call>b",
    )

"""MiMo: conformance of the formats; the recorded outputs are in tests/parsers."""

from __future__ import annotations

import json

from lmkit_testing import ReasoningParserConformance, ToolParserConformance
from lmkit_testing.parsers import check_splits
from lmkit_tool_parser_mimo.formats import MIMO


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


def test_values_on_lines_of_their_own() -> None:
    call = "<tool_call>\n<function=f>\n<parameter=a>{}</parameter>\n</function>\n</tool_call>"
    for written, value in (("\nx\ny\n", "x\ny"), ("x\n", "x\n"), ("\nx", "\nx"), ("x", "x"), ("\n", "\n")):
        assert check_splits(MIMO, call.format(written)).calls == [("f", json.dumps({"a": value}))]

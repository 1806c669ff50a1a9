"""The formats of this plugin read what they declare, whole and split, and survive what is broken."""

import json

import pytest
from lmkit.testing import ReasoningParserConformance, ToolParserConformance
from lmkit.testing.parsers import check_splits
from lmkit_tool_parser_community.formats import MINICPM5


class TestLongcat(ToolParserConformance):
    plugin = "tool_parser:longcat"


class TestInternlm(ToolParserConformance):
    plugin = "tool_parser:internlm"


class TestJamba(ToolParserConformance):
    plugin = "tool_parser:jamba"


class TestPhi4MiniJson(ToolParserConformance):
    plugin = "tool_parser:phi4_mini_json"


class TestXlam(ToolParserConformance):
    plugin = "tool_parser:xlam"


class TestErnie45(ToolParserConformance):
    plugin = "tool_parser:ernie45"


class TestGigachat3(ToolParserConformance):
    plugin = "tool_parser:gigachat3"


class TestApertus(ToolParserConformance):
    plugin = "tool_parser:apertus"


class TestMinicpm5(ToolParserConformance):
    plugin = "tool_parser:minicpm5"


class TestErnie45Reasoning(ReasoningParserConformance):
    plugin = "reasoning_parser:ernie45"
    samples = ("<think>a</think>\n\n<response>\nb\n</response>",)
    prompt_tails = ("", "<think>\n")


class TestIdentityReasoning(ReasoningParserConformance):
    plugin = "reasoning_parser:identity"
    samples = ("a<think>b</think>",)


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("<![CDATA[a </param> b]]>", "a </param> b"),
        ("\n<![CDATA[<x>]]>\n", "<x>"),
        ("<![CDATA[a]]]]><![CDATA[>b]]>", "a]]>b"),
        ("plain", "plain"),
    ],
)
def test_minicpm5_values_may_be_raw(written: str, value: str) -> None:
    text = f'<function name="f"><param name="a">{written}</param><param name="b">c</param></function>'
    assert check_splits(MINICPM5, text).calls == [("f", json.dumps({"a": value, "b": "c"}))]

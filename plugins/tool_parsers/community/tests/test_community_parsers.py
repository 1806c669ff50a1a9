"""The formats of this plugin read what they declare, whole and split, and survive what is broken."""

import json

import pytest
from lmkit_testing import ReasoningParserConformance, ToolParserConformance
from lmkit_testing.parsers import check_splits
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


class TestGigachat35(ToolParserConformance):
    plugin = "tool_parser:gigachat35"


class TestDots2(ToolParserConformance):
    plugin = "tool_parser:dots2"


class TestSolar2(ToolParserConformance):
    plugin = "tool_parser:solar2"


class TestSolar2Reasoning(ReasoningParserConformance):
    plugin = "reasoning_parser:solar2"
    samples = ("<|think:start|>a<|think:end|>b", "a<|think:end|>b")
    prompt_tails = ("", "<|think:start|>")


class TestApertus(ToolParserConformance):
    plugin = "tool_parser:apertus"


class TestMinicpm5(ToolParserConformance):
    plugin = "tool_parser:minicpm5"


class TestFunctionaryV31(ToolParserConformance):
    plugin = "tool_parser:functionary_v31"
    samples = ('<function=f>{"a": 1}</function><function=f>{}</function><|eom_id|>', "a <function=f>oops</function>")


class TestFunctionaryV32(ToolParserConformance):
    plugin = "tool_parser:functionary_v32"
    samples = ('all\nHi >>> there.>>>f\n{"a": ">>>f"}>>>g\n{}', "all\nHi", 'f\n{"a": 1}', "f\noops")
    prompt_tails = ("", ">>>")
    skip = {"test_no_tool_call_is_lost": "`all` before content is a marker"}


class TestSolar(ToolParserConformance):
    plugin = "tool_parser:solar"
    samples = (
        "<|content|>Hi<|end|><|begin|>assistant<|tool_calls|><|tool_call:begin|>ab12<|tool_call:name|>f"
        '<|tool_call:args|>{"a": 1}<|tool_call:end|><|calls|>',
        "<|tool_call:begin|>ab12<|tool_call:name|>f<|tool_call:args|>{}<|tool_call:end|>",
    )
    skip = {"test_no_tool_call_is_lost": "words between markers belong to them"}


class TestSolarReasoning(ReasoningParserConformance):
    plugin = "reasoning_parser:solar"
    samples = ("<|think|>a<|end|><|content|>b", "<|think|>a", "<|content|>b<|end|>")
    prompt_tails = ("", "<|begin|>assistant<|think|>")


class TestAprielReasoning(ReasoningParserConformance):
    plugin = "reasoning_parser:apriel"
    samples = (
        "Here are my reasoning steps:\na\n[BEGIN FINAL RESPONSE]\nb\n[END FINAL RESPONSE]\n",
        'a [BEGIN FINAL RESPONSE] b <tool_calls>[{"name": "f"}]</tool_calls>',
    )
    prompt_tails = ("", "Here are my reasoning steps:\n")


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

"""The formats of this plugin read what they declare, whole and split, and survive what is broken."""

import json

import pytest
from lmkit.api import ToolDef
from lmkit_formats import Params, ToolFormat
from lmkit_testing import ReasoningParserConformance, ToolParserConformance
from lmkit_testing.parsers import check_splits
from lmkit_tool_parser_deepseek.formats import V4, V32, V41


class TestDeepseekV3(ToolParserConformance):
    plugin = "tool_parser:deepseek_v3"


class TestDeepseekV31(ToolParserConformance):
    plugin = "tool_parser:deepseek_v31"


class TestDeepseekV32(ToolParserConformance):
    plugin = "tool_parser:deepseek_v32"


class TestDeepseekV4(ToolParserConformance):
    plugin = "tool_parser:deepseek_v4"


class TestDeepseekV41(ToolParserConformance):
    plugin = "tool_parser:deepseek_v41"


class TestDeepseekR1Reasoning(ReasoningParserConformance):
    plugin = "reasoning_parser:deepseek_r1"
    samples = ("<think>a</think>b", "<think>a")
    prompt_tails = ("", "<think>\n")


class TestDeepseekV3Reasoning(ReasoningParserConformance):
    plugin = "reasoning_parser:deepseek_v3"
    samples = ("<think>a</think>b", "<think>a")
    prompt_tails = ("", "<think>\n")


class TestDeepseekV31Reasoning(ReasoningParserConformance):
    plugin = "reasoning_parser:deepseek_v31"
    samples = ("<think>a</think>b", "<think>a")
    prompt_tails = ("", "<think>\n")


@pytest.mark.parametrize("fmt", [V32, V4, V41])
@pytest.mark.parametrize("key", ["arguments", "input"])
@pytest.mark.parametrize("typed", ["true", "false"])
def test_arguments_in_one_wrapper(fmt: ToolFormat, key: str, typed: str) -> None:
    """Only where the tool has no parameter of that name, and only when it is the only one."""
    body = fmt.body
    assert isinstance(body, Params)

    def call(*elements: str) -> str:
        begin = f"{fmt.section[0]}\n{fmt.open[0]}f{body.name_ends[0]}\n"
        return "".join((begin, *elements, body.foot, "\n", fmt.section_close[0]))

    def element(key: str, value: str, typed: str) -> str:
        return f'{body.open}{key}" string="{typed}">{value}{body.close}\n'

    def read(text: str, *names: str) -> object:
        schema = {"type": "object", "properties": {name: {} for name in names}}
        got = check_splits(fmt, text, tools=[ToolDef("f", parameters=schema)])
        assert got.content == ""
        return json.loads(got.calls[0][1])

    wrapped = element(key, '{"a": 1, "b": "x"}', typed)
    kept = {"a": 1, "b": "x"} if typed == "false" else '{"a": 1, "b": "x"}'
    assert read(call(wrapped), "a", "b") == {"a": 1, "b": "x"}
    cut_off = call(wrapped).partition(body.foot)[0]
    tool = ToolDef("f", parameters={"type": "object", "properties": {"a": {}, "b": {}}})
    assert check_splits(fmt, cut_off, tools=[tool]).content == cut_off.removeprefix(f"{fmt.section[0]}\n").rstrip()
    assert read(call(wrapped), "a", key) == {key: kept}
    assert read(call(wrapped, element("a", "2", "false")), "a", "b") == {key: kept, "a": 2}
    assert read(call(element(key, "no object", "true")), "a") == {key: "no object"}

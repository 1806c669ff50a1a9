"""Gemma: conformance of the formats; the recorded outputs are in tests/parsers."""

from __future__ import annotations

from lmkit_testing import ReasoningParserConformance, ToolParserConformance
from lmkit_testing.parsers import check_splits
from lmkit_tool_parser_gemma.formats import REASONING


class TestGemma4(ToolParserConformance):
    plugin = "tool_parser:gemma4"
    samples = (
        (
            'So: <|tool_call>call:f{a:1,b:<|"|>x, {y}<|"|>,c:[<|"|>d<|"|>,{e:true}]}<tool_call|><|'
            'tool_call>call:f{a:1,b:<|"|>x, {y}<|"|>,c:[<|"|>d<|"|>,{e:true}]}<tool_call|>'
        ),
        "<|tool_call>call:f{}<tool_call|>",
        '<|tool_call>call:f{a:<|"|>x',
        "<|tool_call>call:f{a:1<tool_call|>",
        "<|tool_call>oops<tool_call|>",
        "<|tool_call>call:f{a:1,}<tool_call|> x",
    )


class TestFunctiongemma(ToolParserConformance):
    plugin = "tool_parser:functiongemma"
    samples = ("<start_function_call>call:f{a:<escape>x<escape>,b:1.5}<end_function_call>",)


class TestGemma4Reasoning(ReasoningParserConformance):
    plugin = "reasoning_parser:gemma4"
    samples = ("<|channel>thought\na<channel|>b", "<|channel>a<channel|>b")


def test_a_doubled_marker_opens_once() -> None:
    for begin in ("<|channel><|channel>thought\n", "<|channel>thought\n<|channel>thought\n", "<|channel><|channel>"):
        got = check_splits(REASONING, f"{begin}hm<channel|>Yes")
        assert (got.reasoning, got.content) == ("hm", "Yes")

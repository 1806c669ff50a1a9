"""Gemma: conformance of the formats; the recorded outputs are in tests/parsers."""

from __future__ import annotations

import pytest
from lmkit.api import ToolDef
from lmkit_testing import ReasoningParserConformance, ToolParserConformance
from lmkit_testing.parsers import check_splits
from lmkit_tool_parser_gemma.formats import GEMMA4, REASONING


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


@pytest.mark.parametrize(
    ("body", "arguments"),
    [
        ('query:Paris, France<|"|>,limit:5', None),
        ('query:Paris, France<|"|>', None),
        ('query:"Paris, France",limit:5', None),
        ('limit:5,query:Paris, France<|"|>', '{"limit": 5'),
        ('place:{city:Paris, France<|"|>},limit:5', '{"place": {'),
    ],
)
def test_a_string_without_its_first_mark_gives_no_shorter_call(body: str, arguments: str | None) -> None:
    """What is held back stays text; arguments that were given before are left open."""
    written = f"<|tool_call>call:web_search{{{body}}}<tool_call|>"
    got = check_splits(GEMMA4, written, tools=[ToolDef("web_search")])
    assert got.calls == []
    assert got.cut == ([("web_search", arguments)] if arguments else [])
    assert got.content == (written if arguments is None else got.content)


def test_a_string_without_marks_is_a_string() -> None:
    got = check_splits(GEMMA4, "<|tool_call>call:f{query:Paris,limit:5}<tool_call|>")
    assert got.calls == [("f", '{"query": "Paris", "limit": 5}')]

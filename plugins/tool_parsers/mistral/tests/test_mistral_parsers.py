"""The formats of this plugin read what they declare, whole and split, and survive what is broken."""

from lmkit_testing import ReasoningParserConformance, ToolParserConformance
from lmkit_testing.parsers import check_splits
from lmkit_tool_parser_mistral.formats import REASONING


class TestMistral(ToolParserConformance):
    plugin = "tool_parser:mistral"


class TestMistralReasoning(ReasoningParserConformance):
    plugin = "reasoning_parser:mistral"
    samples = ("[THINK]a[/THINK]b",)


def test_reasoning_may_come_after_text() -> None:
    got = check_splits(REASONING, "Well, [THINK]hm[/THINK]yes.")
    assert (got.reasoning, got.content) == ("hm", "Well, yes.")

"""The formats of this plugin read what they declare, whole and split, and survive what is broken."""

from lmkit_testing import ReasoningParserConformance, ToolParserConformance
from lmkit_testing.parsers import check_splits
from lmkit_tool_parser_qwen.formats import QWEN3_CODER


class TestQwen3Json(ToolParserConformance):
    plugin = "tool_parser:qwen3_json"


class TestQwen3Reasoning(ReasoningParserConformance):
    plugin = "reasoning_parser:qwen3"
    samples = ("<think>a</think>b", "<think>a")
    prompt_tails = ("", "<think>\n")


def test_a_closing_marker_in_a_value_gives_no_shorter_call() -> None:
    """A value without an end of its own may be the beginning of one that has a marker in it."""
    value = "it says </function> there"
    written = f"<function=f>\n<parameter=a>\n{value}\n</parameter>\n</function>"
    got = check_splits(QWEN3_CODER, f"<tool_call>\n{written}\n</tool_call>")
    assert (got.calls, got.cut) == ([], [])
    assert got.content == written
    got = check_splits(QWEN3_CODER, "<tool_call>\n<function=f>\n<parameter=a>\nx\n</function>\n</tool_call>")
    assert got.calls == [("f", '{"a": "x"}')]

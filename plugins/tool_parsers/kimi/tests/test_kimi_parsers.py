"""The formats of this plugin read what they declare, whole and split, and survive what is broken."""

from lmkit_testing import ReasoningParserConformance, ToolParserConformance
from lmkit_testing.parsers import check_splits
from lmkit_tool_parser_kimi.formats import KIMI_K2


class TestKimiK2(ToolParserConformance):
    plugin = "tool_parser:kimi_k2"


class TestKimiK2Reasoning(ReasoningParserConformance):
    plugin = "reasoning_parser:kimi_k2"
    samples = ("<think>a</think>b", "<think>a")
    prompt_tails = ("", "<think>\n")


def test_calls_without_their_section() -> None:
    call = '<|tool_call_begin|>functions.f:{}<|tool_call_argument_begin|>{{"a": 1}}<|tool_call_end|>'
    for begin, end in (("", ""), ("", "<|tool_calls_section_end|>"), ("Well. ", "")):
        got = check_splits(KIMI_K2, f"{begin}{call.format(0)}{call.format(1)}{end}")
        assert (got.content, len(got.calls)) == (begin, 2)


class TestKimiK3(ToolParserConformance):
    plugin = "tool_parser:kimi_k3"
    samples = (
        '<|open|>response<|sep|>Hi<|close|>response<|sep|><|open|>tools<|sep|><|open|>call tool="f" index="1"<|sep|>'
        '<|open|>argument key="a" type="number"<|sep|>3<|close|>argument<|sep|><|close|>call<|sep|>'
        "<|close|>tools<|sep|><|close|>message<|sep|>",
    )


class TestKimiK3Reasoning(ReasoningParserConformance):
    plugin = "reasoning_parser:kimi_k3"
    samples = ("<|open|>think<|sep|>a<|close|>think<|sep|><|open|>response<|sep|>b<|close|>response<|sep|>",)

from lmkit_reasoning_parser_sums.format import Sums
from lmkit_testing import ReasoningParserConformance
from lmkit_testing.parsers import parse


class TestSums(ReasoningParserConformance):
    plugin = "reasoning_parser:sums"
    samples = (
        "17 + 25 = 42",
        "(3 - 1) * 2 =\n4, as asked.\nAnd 1 + 1 = 2.",
        "= 4",
        "2 + 2",
        "It is 4.",
        "1 + " * 100 + "1 = 101",
    )


def test_the_result_is_the_answer():
    message = parse(Sums(), ["17 + ", "25 = ", "42."])
    assert (message.reasoning, message.content) == ("17 + 25 =", "42.")


def test_what_is_no_sum_is_the_answer():
    for text in ("It is 4.", "= 4", "2 + 2", "x = 4"):
        assert parse(Sums(), [text]).content == text

from lmkit_testing import ToolParserConformance
from lmkit_testing.parsers import TOOLS, parse
from lmkit_tool_parser_lines.format import Lines


class TestLines(ToolParserConformance):
    plugin = "tool_parser:lines"
    samples = (
        '@f\ncity = "Paris"\ndays = 3\n@end',
        "Let me see.\n@f\n@end\nDone, mail me @home.\n@nobody\n",
        "@f\nno argument\nand so on",
        "@f\na = 1",
    )


def test_calls_come_in_order_and_text_stays():
    message = parse(Lines(), ['One.\n@f\na = "x"\n@end\n@f\nb = [1]\n@end\nTwo.'], tools=TOOLS)
    assert message.calls == [("f", '{"a": "x"}'), ("f", '{"b": [1]}')]
    assert message.content == "One.\nTwo."


def test_what_breaks_off_is_text():
    message = parse(Lines(), ["@f\na = 1"], tools=TOOLS)
    assert (message.calls, message.content) == ([], "@f\na = 1")
    assert "the output ends within a call" in [warning.message for warning in message.warnings]

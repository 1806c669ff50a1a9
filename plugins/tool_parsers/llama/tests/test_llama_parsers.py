"""The formats of this plugin read what they declare, whole and split, and survive what is broken."""

import pytest
from lmkit_formats import ToolFormat
from lmkit_testing import ToolParserConformance
from lmkit_testing.parsers import check_splits
from lmkit_tool_parser_llama.formats import LLAMA4_PYTHONIC, PYTHONIC


class TestLlama3Json(ToolParserConformance):
    plugin = "tool_parser:llama3_json"


class TestLlama4Json(ToolParserConformance):
    plugin = "tool_parser:llama4_json"


class TestPythonic(ToolParserConformance):
    plugin = "tool_parser:pythonic"


class TestLlama4Pythonic(ToolParserConformance):
    plugin = "tool_parser:llama4_pythonic"


@pytest.mark.parametrize("fmt", [PYTHONIC, LLAMA4_PYTHONIC])
def test_pythonic_calls_after_text(fmt: ToolFormat) -> None:
    for begin in ("Let me see.\n", "Let me see. ", "A [list], [1] and [g(1)]: "):
        got = check_splits(fmt, f'{begin}[f(a=1), f(b="x")]')
        assert (got.content.strip(), got.calls) == (begin.strip(), [("f", '{"a": 1}'), ("f", '{"b": "x"}')])
    for text in ("See [main()] there.", "a[f", "[x](http://y) and f(1)", "x = [f(1), 2]"):
        got = check_splits(fmt, text)
        assert (got.content, got.calls) == (text, [])

"""The formats of this plugin read what they declare, whole and split, and survive what is broken."""

from lmkit.testing import ToolParserConformance


class TestLlama3Json(ToolParserConformance):
    plugin = "tool_parser:llama3_json"


class TestLlama4Json(ToolParserConformance):
    plugin = "tool_parser:llama4_json"

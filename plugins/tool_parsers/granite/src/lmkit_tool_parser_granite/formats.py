"""The formats as data."""

from lmkit_formats import JsonCalls, ReasoningFormat, ToolFormat

GRANITE = ToolFormat(
    "granite",
    JsonCalls(many="list"),
    open=("<|tool_call|>", "<tool_call>"),
    close=("", "</tool_call>"),
    bare="start",
)
GRANITE4 = ToolFormat("granite4", JsonCalls(), open=("<tool_call>",), close=("</tool_call>",), inner="\n", between="\n")
GRANITE_20B_FC = ToolFormat("granite-20b-fc", JsonCalls(), open=("<function_call>",), inner=" ", between="\n")
REASONING = ReasoningFormat(
    "granite",
    ("Here is my thought process:", "Here's my thought process:"),
    ("Here is my response:", "Here's my response:"),
)

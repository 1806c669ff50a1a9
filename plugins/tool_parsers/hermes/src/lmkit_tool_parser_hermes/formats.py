"""The two formats as data."""

from lmkit_formats import JsonCalls, ReasoningFormat, ToolFormat

HERMES = ToolFormat("hermes", JsonCalls(), open=("<tool_call>",), close=("</tool_call>",), inner="\n", between="\n")

# Qwen models sometimes call a tool without closing their reasoning.
THINK = ReasoningFormat("think", ("<think>",), ("</think>",), until=("<tool_call>",))

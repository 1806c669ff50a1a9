"""The formats as data."""

from lmkit.api import JsonCalls, ReasoningFormat, ToolFormat

QWEN3_JSON = ToolFormat(
    "qwen3_json", JsonCalls(), open=("<tool_call>",), close=("</tool_call>",), inner="\n", between="\n"
)

# Qwen models sometimes call a tool without closing their reasoning: the call ends it.
QWEN3 = ReasoningFormat(
    "qwen3", ("<think>",), ("</think>",), until=("<tool_call>",), prompt_opens=True, switch=("enable_thinking",)
)

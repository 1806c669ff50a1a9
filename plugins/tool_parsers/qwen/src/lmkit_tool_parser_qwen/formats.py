"""The formats as data."""

from dataclasses import replace

from lmkit_formats import JsonCalls, Params, ReasoningFormat, ToolFormat

QWEN3_JSON = ToolFormat(
    "qwen3_json", JsonCalls(), open=("<tool_call>",), close=("</tool_call>",), inner="\n", between="\n"
)

# <tool_call> is sometimes missing before <function=NAME>
QWEN3_CODER = ToolFormat(
    "qwen3_coder",
    Params(name_ends=(">",), open="<parameter=", key_ends=(">",), close="</parameter>", strip="newline", gap="\n"),
    open=("<function=",),
    close=("</function>",),
    section=("<tool_call>\n", "<tool_call>"),
    section_close=("\n</tool_call>", "</tool_call>"),
    loose=True,
    between="\n</tool_call>\n<tool_call>\n",
)
QWEN3_XML = replace(QWEN3_CODER, name="qwen3_xml")

# Qwen models sometimes call a tool without closing their reasoning.
QWEN3 = ReasoningFormat(
    "qwen3", ("<think>",), ("</think>",), until=("<tool_call>",), prompt_opens=True, switch=("enable_thinking",)
)

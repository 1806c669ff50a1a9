"""The formats as data."""

from lmkit_formats import Params, ReasoningFormat, ToolFormat

# the XML of Qwen 3 Coder, but values are on the line of their tags, so that a newline at one end belongs to the value
MIMO = ToolFormat(
    "mimo",
    Params(name_ends=(">",), open="<parameter=", key_ends=(">",), close="</parameter>", block=True, gap="\n"),
    open=("<function=",),
    close=("</function>",),
    section=("<tool_call>\n", "<tool_call>"),
    section_close=("\n</tool_call>", "</tool_call>"),
    between="\n</tool_call>\n<tool_call>\n",
    loose=True,
)

REASONING = ReasoningFormat(
    "mimo", ("<think>",), ("</think>",), until=("<tool_call>",), prompt_opens=True, switch=("enable_thinking",)
)

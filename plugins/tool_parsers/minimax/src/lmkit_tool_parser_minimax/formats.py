"""The formats as data."""

from lmkit_formats import JsonCalls, Params, ReasoningFormat, ToolFormat

MINIMAX = ToolFormat(
    "minimax",
    JsonCalls(),
    section=("<tool_calls>",),
    section_close=("</tool_calls>",),
    opaque=("<think>", "</think>"),  # calls that are only thought of
    between="\n",
)
MINIMAX_M2 = ToolFormat(
    "minimax_m2",
    Params(name_ends=('">',), open='<parameter name="', key_ends=('">',), close="</parameter>", gap="\n"),
    open=('<invoke name="',),
    close=("</invoke>",),
    section=("<minimax:tool_call>",),
    section_close=("</minimax:tool_call>",),
    between="\n",
)

# the prompt ends in <think>
REASONING = ReasoningFormat(
    "minimax_m2", ("<think>",), ("</think>",), until=("<minimax:tool_call>",), prompt_opens=True
)

"""The formats as data."""

from lmkit_formats import Params, ReasoningFormat, ToolFormat

STEP3 = ToolFormat(
    "step3",
    Params(
        prefix=('<steptml:invoke name="',),
        name_ends=('">',),
        open='<steptml:parameter name="',
        key_ends=('">',),
        close="</steptml:parameter>",
        foot="</steptml:invoke>",
    ),
    open=("<｜tool_call_begin｜>function<｜tool_sep｜>", "<｜tool_call_begin｜>"),
    close=("<｜tool_call_end｜>",),
    section=("<｜tool_calls_begin｜>",),
    section_close=("<｜tool_calls_end｜>",),
    between="\n",
)
STEP3P5 = ToolFormat(
    "step3p5",
    Params(name_ends=(">",), open="<parameter=", key_ends=(">",), close="</parameter>", strip="newline", gap="\n"),
    open=("<function=",),
    close=("</function>",),
    section=("<tool_call>\n", "<tool_call>"),
    section_close=("\n</tool_call>", "</tool_call>"),
    between="\n</tool_call>\n<tool_call>\n",
    loose=True,
)

REASONING_STEP3 = ReasoningFormat("step3", ("<think>",), ("</think>",), prompt_opens=True)
# the template writes a newline before and after the closing tag
REASONING_STEP3P5 = ReasoningFormat(
    "step3p5",
    ("<think>",),
    ("</think>", "\n</think>", "</think>\n", "\n</think>\n"),
    until=("<tool_call>",),
    prompt_opens=True,
    anywhere=True,
    trim="",
)

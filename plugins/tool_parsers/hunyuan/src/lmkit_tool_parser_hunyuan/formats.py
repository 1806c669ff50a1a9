"""The formats as data."""

from lmkit_formats import JsonCalls, Params, ReasoningFormat, ToolFormat

HUNYUAN_A13B = ToolFormat(
    "hunyuan_a13b",
    JsonCalls(many="list"),
    open=("<tool_calls>",),
    close=("</tool_calls>",),
    drop=("<answer>\n", "<answer>", "\n</answer>", "</answer>"),
    opaque=("<think>", "</think>"),
)
HY_V3 = ToolFormat(
    "hy_v3",
    Params(
        name_ends=("<tool_sep>",),
        open="<arg_key>",
        key_ends=("</arg_key>",),
        value_open="<arg_value>",
        close="</arg_value>",
        untyped="json",
    ),
    open=("<tool_call>",),
    close=("</tool_call>",),
    section=("<tool_calls>",),
    section_close=("</tool_calls>",),
)
# the same with longer names of its tags
HY_V4 = ToolFormat(
    "hy_v4",
    Params(
        name_ends=("<tool_sep:opensource>",),
        open="<arg_key:opensource>",
        key_ends=("</arg_key:opensource>",),
        value_open="<arg_value:opensource>",
        close="</arg_value:opensource>",
        untyped="json",
        gap="\n",
    ),
    open=("<tool_call:opensource>",),
    close=("</tool_call:opensource>",),
    section=("<tool_calls:opensource>",),
    section_close=("</tool_calls:opensource>",),
    loose=True,
    between="\n",
)
REASONING_A13B = ReasoningFormat(
    "hunyuan_a13b",
    ("<think>\n", "<think>"),
    ("\n</think>\n<answer>\n", "\n</think>\n", "\n</think>", "</think>\n<answer>\n", "</think>"),
    switch=("enable_thinking",),
    drop=("<answer>\n", "<answer>", "\n</answer>", "</answer>"),
)
REASONING_V3 = ReasoningFormat(
    "hy_v3",
    ("<think>",),
    ("</think>",),
    prompt_opens=True,
    switch=("reasoning_effort",),
    off=("no_think", "none"),
    default_on=False,
)
REASONING_V4 = ReasoningFormat(
    "hy_v4",
    ("<think:opensource>",),
    ("</think:opensource>",),
    prompt_opens=True,
    switch=("reasoning_effort",),
    off=("no_think", "none"),
    default_on=False,
)

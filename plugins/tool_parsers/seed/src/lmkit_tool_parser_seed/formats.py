"""The formats as data."""

from lmkit_formats import Params, ReasoningFormat, ToolFormat

SEED_OSS = ToolFormat(
    "seed_oss",
    Params(name_ends=(">",), open="<parameter=", key_ends=(">",), close="</parameter>", gap="\n"),
    open=("<function=",),
    close=("</function>",),
    section=("<seed:tool_call>\n", "<seed:tool_call>"),
    section_close=("\n</seed:tool_call>", "</seed:tool_call>"),
    between="\n</seed:tool_call>\n<seed:tool_call>\n",
)

REASONING = ReasoningFormat(
    "seed_oss",
    ("<seed:think>",),
    ("</seed:think>",),
    until=("<seed:tool_call>",),
    prompt_opens=True,
    switch=("thinking_budget",),
    off=(0,),
)

"""The formats as data."""

from lmkit_formats import JsonCalls, ReasoningFormat, ToolFormat

NEMOTRON_V2 = ToolFormat("nemotron_v2", JsonCalls(many="list"), open=("<TOOLCALL>",), close=("</TOOLCALL>",))

NEMOTRON_V3 = ReasoningFormat(
    "nemotron_v3",
    ("<think>",),
    ("</think>",),
    until=("<tool_call>", "<TOOLCALL>"),
    prompt_opens=True,
    switch=("enable_thinking",),
)

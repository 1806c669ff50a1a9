"""The formats as data."""

from lmkit_formats import NamedJson, ReasoningFormat, ToolFormat

KIMI_K2 = ToolFormat(
    "kimi_k2",
    NamedJson(
        ends=("<|tool_call_argument_begin|>",),
        pattern=r"(?P<id>(?:functions\.)?(?P<name>[^\s:<>|]+):\d+)",
        written="functions.{name}:{index}",
    ),
    open=("<|tool_call_begin|>",),
    close=("<|tool_call_end|>",),
    section=("<|tool_calls_section_begin|>",),
    section_close=("<|tool_calls_section_end|>",),
    noise="drop",
    loose=True,
)
REASONING = ReasoningFormat(
    "kimi_k2",
    ("<think>",),
    ("</think>",),
    until=("<|tool_calls_section_begin|>", "<|tool_call_begin|>"),
    prompt_opens=True,
    switch=("thinking", "enable_thinking"),
)

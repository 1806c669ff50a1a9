"""The formats as data."""

from lmkit_formats import LooseObject, ReasoningFormat, ToolFormat

GEMMA4 = ToolFormat(
    "gemma4",
    LooseObject(quotes=('<|"|>',), prefix=("call:",)),
    open=("<|tool_call>",),
    close=("<tool_call|>",),
)
FUNCTIONGEMMA = ToolFormat(
    "functiongemma",
    LooseObject(quotes=("<escape>",), prefix=("call:",)),
    open=("<start_function_call>",),
    close=("<end_function_call>",),
)

REASONING = ReasoningFormat(
    "gemma4",
    ("<|channel>thought\n", "<|channel>thought", "<|channel>"),
    ("<channel|>",),
    until=("<|tool_call>",),
    switch=("enable_thinking",),
    anywhere=True,
    drop=("<channel|>",),  # of reasoning that the prompt has begun and ended
)

"""The formats as data."""

from lmkit.api import JsonCalls, ReasoningFormat, ToolFormat

_WRAPPERS = ("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>")
COMMAND = ToolFormat(
    "cohere_command",
    JsonCalls(name=("tool_name",), arguments=("parameters",), id=("tool_call_id",), many="list"),
    open=("<|START_ACTION|>",),
    close=("<|END_ACTION|>",),
    drop=_WRAPPERS,
)
REASONING = ReasoningFormat(
    "cohere",
    ("<|START_THINKING|>",),
    ("<|END_THINKING|>",),
    until=("<|START_ACTION|>",),
    answer=("<|START_RESPONSE|>",),
    drop=_WRAPPERS,
)

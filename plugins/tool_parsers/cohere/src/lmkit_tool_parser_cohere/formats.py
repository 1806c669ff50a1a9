"""The formats as data."""

from lmkit_formats import JsonCalls, ReasoningFormat, ToolFormat

_WRAPPERS = ("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>")
COMMAND = ToolFormat(
    "cohere_command",
    JsonCalls(name=("tool_name",), arguments=("parameters",), id=("tool_call_id",), many="list"),
    open=("<|START_ACTION|>",),
    close=("<|END_ACTION|>",),
    drop=_WRAPPERS,
)
# Command R and R+, up to 08-2024
COMMAND_R = ToolFormat(
    "command_r",
    JsonCalls(name=("tool_name",), arguments=("parameters",), many="list"),
    open=(
        "Action: ```json\n[",
        "Action:```json\n[",
        "Action: ```json[",
        "Action:\n```json\n[",
        "Action:\n```json[",
        "Action: ```\n[",
    ),
    close=("\n```", "```"),
)
REASONING = ReasoningFormat(
    "cohere",
    ("<|START_THINKING|>",),
    ("<|END_THINKING|>",),
    until=("<|START_ACTION|>",),
    answer=("<|START_RESPONSE|>",),
    drop=_WRAPPERS,
)

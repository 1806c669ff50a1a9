"""The formats as data."""

from lmkit_formats import JsonCalls, NamedJson, ReasoningFormat, ToolFormat

MISTRAL = ToolFormat(
    "mistral",
    (NamedJson(ends=("[ARGS]", "{"), id_mark="[CALL_ID]"), JsonCalls(id=("id",), many="any")),
    section=("[TOOL_CALLS]",),
    between="[TOOL_CALLS]",
    id_length=9,
)
REASONING = ReasoningFormat("mistral", ("[THINK]",), ("[/THINK]",), stray_close=True, anywhere=True)

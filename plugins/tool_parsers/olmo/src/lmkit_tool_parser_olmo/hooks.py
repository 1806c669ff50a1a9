"""Registers the formats."""

from lmkit.api import ReasoningParserSpec, ToolParserSpec, hookimpl


@hookimpl
def lmkit_tool_parsers() -> list[ToolParserSpec]:
    return [
        ToolParserSpec(
            name="olmo3",
            summary="<function_calls>, one f(a=1) a line, </function_calls> (Olmo 3)",
            target="lmkit_tool_parser_olmo.formats:OLMO3",
            models=("Olmo3*",),
            markers=("<function_calls>",),
        ),
    ]


@hookimpl
def lmkit_reasoning_parsers() -> list[ReasoningParserSpec]:
    return [
        ReasoningParserSpec(
            name="olmo3",
            summary="<think>...</think> as plain text (Olmo 3)",
            target="lmkit_tool_parser_olmo.formats:REASONING",
            models=("Olmo3*",),
        ),
    ]

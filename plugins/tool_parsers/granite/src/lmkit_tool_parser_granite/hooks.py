"""Registers the formats."""

from lmkit.api import ReasoningParserSpec, ToolParserSpec, hookimpl


@hookimpl
def lmkit_tool_parsers() -> list[ToolParserSpec]:
    return [
        ToolParserSpec(
            name="granite",
            summary='<|tool_call|>[{"name": ..., "arguments": {...}}, ...] (Granite 3)',
            target="lmkit_tool_parser_granite.formats:GRANITE",
            markers=("<|tool_call|>",),
        ),
        ToolParserSpec(
            name="granite4",
            summary='<tool_call>{"name": ..., "arguments": {...}}</tool_call> (Granite 4)',
            target="lmkit_tool_parser_granite.formats:GRANITE4",
            models=("GraniteMoeHybrid*", "granite-4*"),
        ),
        ToolParserSpec(
            name="granite-20b-fc",
            summary='<function_call> {"name": ..., "arguments": {...}} (granite-20b-functioncalling)',
            target="lmkit_tool_parser_granite.formats:GRANITE_20B_FC",
            models=("*granite-20b-functioncalling*",),
            markers=("<function_call>",),
        ),
    ]


@hookimpl
def lmkit_reasoning_parsers() -> list[ReasoningParserSpec]:
    return [
        ReasoningParserSpec(
            name="granite",
            summary="Here is my thought process: ... Here is my response: ... (Granite 3.2)",
            target="lmkit_tool_parser_granite.formats:REASONING",
            markers=("Here is my thought process:",),
        ),
    ]

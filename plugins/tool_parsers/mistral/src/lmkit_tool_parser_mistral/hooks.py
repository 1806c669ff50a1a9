"""Registers the formats."""

from lmkit.api import ReasoningParserSpec, ToolParserSpec, hookimpl


@hookimpl
def lmkit_tool_parsers() -> list[ToolParserSpec]:
    return [
        ToolParserSpec(
            name="mistral",
            summary='[TOOL_CALLS]NAME[ARGS]{...} or [TOOL_CALLS][{"name": ..., "arguments": {...}}]',
            target="lmkit_tool_parser_mistral.formats:MISTRAL",
            models=("Mistral*", "Ministral*", "Magistral*", "Devstral*", "Pixtral*", "Voxtral*"),
            markers=("[TOOL_CALLS]",),
        ),
    ]


@hookimpl
def lmkit_reasoning_parsers() -> list[ReasoningParserSpec]:
    return [
        ReasoningParserSpec(
            name="mistral",
            summary="[THINK]...[/THINK] (Magistral)",
            target="lmkit_tool_parser_mistral.formats:REASONING",
            models=("Magistral*",),
            markers=("[THINK]",),
        ),
    ]

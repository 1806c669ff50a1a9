"""Registers the formats."""

from lmkit.api import ReasoningParserSpec, ToolParserSpec, hookimpl


@hookimpl
def lmkit_tool_parsers() -> list[ToolParserSpec]:
    return [
        ToolParserSpec(
            name="nemotron_v2",
            summary='<TOOLCALL>[{"name": ..., "arguments": {...}}]</TOOLCALL> (Nemotron Nano 2, Llama Nemotron)',
            target="lmkit_tool_parser_nvidia.formats:NEMOTRON_V2",
            markers=("<TOOLCALL>",),
        ),
    ]


@hookimpl
def lmkit_reasoning_parsers() -> list[ReasoningParserSpec]:
    return [
        ReasoningParserSpec(
            name="nemotron_v3",
            summary="<think>...</think>, which may be missing before a call (Nemotron 3)",
            target="lmkit_tool_parser_nvidia.formats:NEMOTRON_V3",
            models=("NemotronH*", "*Nemotron-3*"),
        ),
    ]

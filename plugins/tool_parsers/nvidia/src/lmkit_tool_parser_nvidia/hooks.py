"""Registers the formats."""

from lmkit.api import ReasoningParserSpec, hookimpl


@hookimpl
def lmkit_reasoning_parsers() -> list[ReasoningParserSpec]:
    return [
        ReasoningParserSpec(
            name="nemotron_v3",
            summary="<think>...</think>; a tool call ends it (Nemotron 3)",
            target="lmkit_tool_parser_nvidia.formats:NEMOTRON_V3",
            models=("NemotronH*", "*Nemotron-3*"),
        ),
    ]

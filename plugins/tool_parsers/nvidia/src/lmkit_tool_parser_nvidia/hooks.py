"""Registers the formats."""

from lmkit.api import ReasoningParserSpec, hookimpl


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

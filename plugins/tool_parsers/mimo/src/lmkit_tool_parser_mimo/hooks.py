"""Registers the formats."""

from lmkit.api import ReasoningParserSpec, ToolParserSpec, hookimpl


@hookimpl
def lmkit_tool_parsers() -> list[ToolParserSpec]:
    return [
        ToolParserSpec(
            name="mimo",
            summary="<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call> (MiMo)",
            target="lmkit_tool_parser_mimo.formats:MIMO",
            models=("MiMo*",),
        ),
    ]


@hookimpl
def lmkit_reasoning_parsers() -> list[ReasoningParserSpec]:
    return [
        ReasoningParserSpec(
            name="mimo",
            summary="<think>...</think>, which may be missing before a call (MiMo)",
            target="lmkit_tool_parser_mimo.formats:REASONING",
            models=("MiMo*",),
        ),
    ]

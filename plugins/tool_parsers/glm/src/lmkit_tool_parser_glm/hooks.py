"""Registers the formats."""

from lmkit.api import ReasoningParserSpec, ToolParserSpec, hookimpl


@hookimpl
def lmkit_tool_parsers() -> list[ToolParserSpec]:
    return [
        ToolParserSpec(
            name="glm45",
            summary="<tool_call>NAME, then <arg_key>K</arg_key><arg_value>V</arg_value>, </tool_call> (GLM 4.5, 4.6)",
            target="lmkit_tool_parser_glm.formats:GLM45",
            models=("Glm4Moe*", "*GLM-4.5*", "*GLM-4.6*"),
            markers=("<arg_key>",),
        ),
        ToolParserSpec(
            name="glm47",
            summary="<tool_call>NAME<arg_key>K</arg_key><arg_value>V</arg_value></tool_call> (GLM 4.7 and later)",
            target="lmkit_tool_parser_glm.formats:GLM47",
            models=("*GLM-4.7*", "*GLM-5*"),
            markers=("<arg_key>",),
        ),
    ]


@hookimpl
def lmkit_reasoning_parsers() -> list[ReasoningParserSpec]:
    return [
        ReasoningParserSpec(
            name="glm45",
            summary="<think>...</think>, which may be missing before a call (GLM 4.5 and later)",
            target="lmkit_tool_parser_glm.formats:REASONING",
            models=("Glm4Moe*", "*GLM-4.[5-9]*", "*GLM-5*"),
            markers=("<arg_key>",),
        ),
    ]

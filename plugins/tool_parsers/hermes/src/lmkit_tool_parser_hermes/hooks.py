"""Registers the formats."""

from lmkit.api import ReasoningParserSpec, Tier, ToolParserSpec, hookimpl


@hookimpl
def lmkit_tool_parsers() -> list[ToolParserSpec]:
    return [
        ToolParserSpec(
            name="hermes",
            summary='<tool_call>{"name": ..., "arguments": {...}}</tool_call> (Hermes, Qwen 2.5 and 3, demo)',
            target="lmkit_tool_parser_hermes.formats:HERMES",
            # how templates tell the model to write a call; "<tool_call>" alone is also used by XML formats
            markers=(
                "a json object with function name and arguments within <tool_call>",
                '<tool_call>\\n{"name"',
                '<tool_call>\n{"name"',
                '<tool_call>{"name"',
            ),
            tier=Tier.REFERENCE,  # what knows a family better is preferred
            stability="stable",
        )
    ]


@hookimpl
def lmkit_reasoning_parsers() -> list[ReasoningParserSpec]:
    return [
        ReasoningParserSpec(
            name="think",
            summary="<think>...</think> before the answer (Qwen 3, DeepSeek R1, SmolLM 3, demo)",
            target="lmkit_tool_parser_hermes.formats:THINK",
            markers=("<think>",),
            tier=Tier.REFERENCE,  # what knows a family better is preferred
            stability="stable",
        )
    ]

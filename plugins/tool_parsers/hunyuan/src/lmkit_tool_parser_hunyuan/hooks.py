"""Registers the formats."""

from lmkit.api import ReasoningParserSpec, ToolParserSpec, hookimpl


@hookimpl
def lmkit_tool_parsers() -> list[ToolParserSpec]:
    return [
        ToolParserSpec(
            name="hunyuan_a13b",
            summary='<tool_calls>[{"name": ..., "arguments": {...}}]</tool_calls> (Hunyuan A13B)',
            target="lmkit_tool_parser_hunyuan.formats:HUNYUAN_A13B",
            models=("HunYuanMoEV1*",),
        ),
        ToolParserSpec(
            name="hy_v3",
            summary="<tool_call>NAME<tool_sep><arg_key>K</arg_key><arg_value>V</arg_value></tool_call> (Hunyuan V3)",
            target="lmkit_tool_parser_hunyuan.formats:HY_V3",
            markers=("<tool_sep>",),
        ),
        ToolParserSpec(
            name="hy_v4",
            summary="<tool_call:opensource>NAME<tool_sep:opensource><arg_key:opensource>K... (Hy 4)",
            target="lmkit_tool_parser_hunyuan.formats:HY_V4",
            markers=("<tool_sep:opensource>",),
        ),
    ]


@hookimpl
def lmkit_reasoning_parsers() -> list[ReasoningParserSpec]:
    return [
        ReasoningParserSpec(
            name="hunyuan_a13b",
            summary="<think>...</think><answer>...</answer> (Hunyuan A13B)",
            target="lmkit_tool_parser_hunyuan.formats:REASONING_A13B",
            models=("HunYuanMoEV1*",),
        ),
        ReasoningParserSpec(
            name="hy_v3",
            summary="<think>...</think> by the template switch `reasoning_effort` (Hunyuan V3)",
            target="lmkit_tool_parser_hunyuan.formats:REASONING_V3",
        ),
        ReasoningParserSpec(
            name="hy_v4",
            summary="<think:opensource>...</think:opensource> by the template switch `reasoning_effort` (Hy 4)",
            target="lmkit_tool_parser_hunyuan.formats:REASONING_V4",
            markers=("<think:opensource>",),
        ),
    ]

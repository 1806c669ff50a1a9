"""Registers the formats."""

from lmkit.api import ReasoningParserSpec, ToolParserSpec, hookimpl


@hookimpl
def lmkit_tool_parsers() -> list[ToolParserSpec]:
    return [
        ToolParserSpec(
            name="minimax",
            summary='<tool_calls>, one {"name": ..., "arguments": {...}} a line, </tool_calls> (MiniMax M1)',
            target="lmkit_tool_parser_minimax.formats:MINIMAX",
            models=("MiniMaxM1*", "MiniMaxText01*"),
        ),
        ToolParserSpec(
            name="minimax_m2",
            summary='<invoke name="N"><parameter name="K">V</parameter></invoke> in <minimax:tool_call> (MiniMax M2)',
            target="lmkit_tool_parser_minimax.formats:MINIMAX_M2",
            models=("MiniMaxM2*",),
            markers=("<minimax:tool_call>",),
        ),
    ]


@hookimpl
def lmkit_reasoning_parsers() -> list[ReasoningParserSpec]:
    return [
        ReasoningParserSpec(
            name="minimax_m2",
            summary="reasoning up to </think> (MiniMax M2)",
            target="lmkit_tool_parser_minimax.formats:REASONING",
            models=("MiniMaxM2*",),
            markers=("<minimax:tool_call>",),
        ),
        ReasoningParserSpec(
            name="minimax_m2_append_think",
            summary="<think>...</think> stays in the content (MiniMax M2)",
            target="lmkit_tool_parser_minimax.append_think:APPEND_THINK",
        ),
    ]

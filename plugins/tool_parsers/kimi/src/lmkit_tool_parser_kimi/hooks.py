"""Registers the formats."""

from lmkit.api import ReasoningParserSpec, ToolParserSpec, hookimpl


@hookimpl
def lmkit_tool_parsers() -> list[ToolParserSpec]:
    return [
        ToolParserSpec(
            name="kimi_k2",
            summary="<|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>{...}<|tool_call_end|>",
            target="lmkit_tool_parser_kimi.formats:KIMI_K2",
            markers=("<|tool_calls_section_begin|>",),
        ),
        ToolParserSpec(
            name="kimi_k3",
            summary='<|open|>call tool="NAME" index="1"<|sep|><|open|>argument key="K" ... (Kimi K3)',
            target="lmkit_tool_parser_kimi.formats:KIMI_K3",
            models=("*Kimi-K3*",),
            markers=("open_tag('call', [('tool'",),
        ),
    ]


@hookimpl
def lmkit_reasoning_parsers() -> list[ReasoningParserSpec]:
    return [
        ReasoningParserSpec(
            name="kimi_k2",
            summary="<think>...</think>; a section of calls ends it (Kimi K2 Thinking)",
            target="lmkit_tool_parser_kimi.formats:REASONING",
            models=("*Kimi-K2-Thinking*",),
        ),
        ReasoningParserSpec(
            name="kimi_k3",
            summary="<|open|>think<|sep|>...<|close|>think<|sep|> (Kimi K3)",
            target="lmkit_tool_parser_kimi.formats:REASONING_K3",
            models=("*Kimi-K3*",),
            markers=("open_tag('think'",),
        ),
    ]

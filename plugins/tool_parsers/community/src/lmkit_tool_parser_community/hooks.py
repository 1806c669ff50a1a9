"""Registers the formats."""

from lmkit.api import ReasoningParserSpec, ToolParserSpec, hookimpl


@hookimpl
def lmkit_tool_parsers() -> list[ToolParserSpec]:
    return [
        ToolParserSpec(
            name="longcat",
            summary='<longcat_tool_call>{"name": ..., "arguments": {...}}</longcat_tool_call> (LongCat)',
            target="lmkit_tool_parser_community.formats:LONGCAT",
            markers=("<longcat_tool_call>",),
        ),
        ToolParserSpec(
            name="internlm",
            summary='<|action_start|><|plugin|>{"name": ..., "parameters": {...}}<|action_end|> (InternLM 2.5 and 3)',
            target="lmkit_tool_parser_community.formats:INTERNLM",
            models=("InternLM*",),
            markers=("<|action_start|>",),
        ),
        ToolParserSpec(
            name="jamba",
            summary='<tool_calls>[{"name": ..., "arguments": {...}}]</tool_calls> (Jamba 1.5)',
            target="lmkit_tool_parser_community.formats:JAMBA",
            models=("Jamba*",),
        ),
        ToolParserSpec(
            name="phi4_mini_json",
            summary='functools[{"name": ..., "arguments": {...}}] (Phi-4 mini)',
            target="lmkit_tool_parser_community.formats:PHI4_MINI_JSON",
            models=("Phi-4-mini*",),
            markers=("functools[",),
        ),
        ToolParserSpec(
            name="xlam",
            summary='[{"name": ..., "arguments": {...}}], bare or in a fence (xLAM 2)',
            target="lmkit_tool_parser_community.formats:XLAM",
            models=("*xLAM-2*",),
        ),
        ToolParserSpec(
            name="ernie45",
            summary='<tool_call>{"name": ..., "arguments": {...}}</tool_call> and <response> (ERNIE 4.5)',
            target="lmkit_tool_parser_community.formats:ERNIE45",
            models=("Ernie4_5*",),
        ),
        ToolParserSpec(
            name="gigachat3",
            summary='function call<|role_sep|>{"name": ..., "arguments": {...}} or <|function_call|>{...} (GigaChat 3)',
            target="lmkit_tool_parser_community.formats:GIGACHAT3",
            markers=("function call<|role_sep|>", "<|function_call|>"),
        ),
        ToolParserSpec(
            name="apertus",
            summary="<|tools_prefix|>[{NAME: {...}}]<|tools_suffix|> (Apertus)",
            target="lmkit_tool_parser_community.formats:APERTUS",
            markers=("<|tools_prefix|>",),
        ),
        ToolParserSpec(
            name="minicpm5",
            summary='<function name="NAME"><param name="KEY">VALUE</param></function> (MiniCPM 5)',
            target="lmkit_tool_parser_community.formats:MINICPM5",
            markers=('<function name="',),
        ),
    ]


@hookimpl
def lmkit_reasoning_parsers() -> list[ReasoningParserSpec]:
    return [
        ReasoningParserSpec(
            name="ernie45",
            summary="<think>...</think><response>...</response> (ERNIE 4.5 thinking)",
            target="lmkit_tool_parser_community.formats:ERNIE45_REASONING",
        ),
        ReasoningParserSpec(
            name="identity",
            summary="nothing is reasoning",
            target="lmkit_tool_parser_community.formats:IDENTITY",
        ),
    ]

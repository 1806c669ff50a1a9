"""Registers the formats."""

from lmkit.api import ReasoningParserSpec, ToolParserSpec, hookimpl


@hookimpl
def lmkit_tool_parsers() -> list[ToolParserSpec]:
    return [
        ToolParserSpec(
            name="gemma4",
            summary='<|tool_call>call:NAME{key:<|"|>text<|"|>,n:42}<tool_call|> (Gemma 4)',
            target="lmkit_tool_parser_gemma.formats:GEMMA4",
            models=("Gemma4*",),
            markers=("<|tool_call>",),
        ),
        ToolParserSpec(
            name="functiongemma",
            summary="<start_function_call>call:NAME{key:<escape>text<escape>}<end_function_call> (FunctionGemma)",
            target="lmkit_tool_parser_gemma.formats:FUNCTIONGEMMA",
            models=("*functiongemma*",),
            markers=("<start_function_call>",),
        ),
    ]


@hookimpl
def lmkit_reasoning_parsers() -> list[ReasoningParserSpec]:
    return [
        ReasoningParserSpec(
            name="gemma4",
            summary="<|channel>thought, a newline, ...<channel|> (Gemma 4)",
            target="lmkit_tool_parser_gemma.formats:REASONING",
            models=("Gemma4*",),
            markers=("<|channel>",),
        ),
    ]

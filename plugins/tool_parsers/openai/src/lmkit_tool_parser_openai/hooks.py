"""Registers Harmony, once for calls and once for reasoning alone."""

from lmkit.api import ReasoningParserSpec, ToolParserSpec, hookimpl

MODELS = ("GptOss*", "*gpt-oss*")
MARKERS = ("<|start|>assistant<|channel|>",)


@hookimpl
def lmkit_tool_parsers() -> list[ToolParserSpec]:
    return [
        ToolParserSpec(
            name="openai",
            summary="Harmony messages: to=functions.NAME<|channel|>commentary json<|message|>{...} (gpt-oss)",
            target="lmkit_tool_parser_openai.formats:CALLS",
            models=MODELS,
            markers=MARKERS,
        )
    ]


@hookimpl
def lmkit_reasoning_parsers() -> list[ReasoningParserSpec]:
    return [
        ReasoningParserSpec(
            name="openai_gptoss",
            summary="the analysis channel of Harmony (gpt-oss)",
            target="lmkit_tool_parser_openai.formats:REASONING",
            models=MODELS,
            markers=MARKERS,
        )
    ]

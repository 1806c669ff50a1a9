"""Registers the formats."""

from lmkit.api import ReasoningParserSpec, ToolParserSpec, hookimpl


@hookimpl
def lmkit_tool_parsers() -> list[ToolParserSpec]:
    return [
        ToolParserSpec(
            name="step3",
            summary='<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="N">... (Step 3)',
            target="lmkit_tool_parser_step.formats:STEP3",
            models=("Step3*",),
            markers=("<steptml:invoke",),
        ),
        ToolParserSpec(
            name="step3p5",
            summary="<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call> (Step 3.5)",
            target="lmkit_tool_parser_step.formats:STEP3P5",
            models=("Step3p5*", "*Step-3.5*"),
        ),
    ]


@hookimpl
def lmkit_reasoning_parsers() -> list[ReasoningParserSpec]:
    return [
        ReasoningParserSpec(
            name="step3",
            summary="reasoning up to </think> (Step 3)",
            target="lmkit_tool_parser_step.formats:REASONING_STEP3",
            models=("Step3*",),
        ),
        ReasoningParserSpec(
            name="step3p5",
            summary="reasoning up to </think>, with a newline on both sides (Step 3.5)",
            target="lmkit_tool_parser_step.formats:REASONING_STEP3P5",
            models=("Step3p5*", "*Step-3.5*"),
        ),
    ]

"""Registers the formats."""

from lmkit.api import ReasoningParserSpec, ToolParserSpec, hookimpl


@hookimpl
def lmkit_tool_parsers() -> list[ToolParserSpec]:
    return [
        ToolParserSpec(
            name="deepseek_v3",
            summary="function<｜tool▁sep｜>NAME and a json fence in <｜tool▁call▁begin｜> (DeepSeek V3, R1)",
            target="lmkit_tool_parser_deepseek.formats:V3",
            models=("DeepSeek-V3", "DeepSeek-V3-0324", "DeepSeek-R1*"),
            # as templates write it
            markers=(
                "<｜tool▁sep｜>' + tool['function']['name'] + '\\n' + '```json",
                "<｜tool▁sep｜>function\n```json",
            ),
        ),
        ToolParserSpec(
            name="deepseek_v31",
            summary="<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{...}<｜tool▁call▁end｜> (DeepSeek V3.1)",
            target="lmkit_tool_parser_deepseek.formats:V31",
            models=("DeepSeek-V3.1*",),
            markers=("tool_call_name<｜tool▁sep｜>tool_call_arguments",),
        ),
        ToolParserSpec(
            name="deepseek_v32",
            summary="<｜DSML｜function_calls><｜DSML｜invoke name=NAME>... (DeepSeek V3.2)",
            target="lmkit_tool_parser_deepseek.formats:V32",
            models=("DeepseekV32*",),
            markers=("<｜DSML｜function_calls>",),
        ),
        ToolParserSpec(
            name="deepseek_v4",
            summary="<｜DSML｜tool_calls><｜DSML｜invoke name=NAME>... (DeepSeek V4)",
            target="lmkit_tool_parser_deepseek.formats:V4",
            models=("DeepseekV4*",),
            markers=("<｜DSML｜tool_calls>",),
        ),
        ToolParserSpec(
            name="deepseek_v41",
            summary="<｜DSML｜ calls><｜DSML｜ invoke name=NAME>... (DeepSeek V4.1)",
            target="lmkit_tool_parser_deepseek.formats:V41",
            models=("DeepseekV41*",),
            markers=("<｜DSML｜ calls>",),
        ),
    ]


@hookimpl
def lmkit_reasoning_parsers() -> list[ReasoningParserSpec]:
    return [
        ReasoningParserSpec(
            name="deepseek_r1",
            summary="<think>...</think>, the start may be missing (DeepSeek R1 and its distillations)",
            target="lmkit_tool_parser_deepseek.formats:R1",
            models=("DeepSeek-R1*",),
            markers=("<｜Assistant｜><think>\\n",),
        ),
        ReasoningParserSpec(
            name="deepseek_v3",
            summary="<think>...</think> when the template switch `thinking` is on (DeepSeek V3.1 and later)",
            target="lmkit_tool_parser_deepseek.formats:REASONING_V3",
            markers=("<｜Assistant｜><think></think>", "<｜Assistant｜></think>"),
        ),
        ReasoningParserSpec(
            name="deepseek_v31",
            summary="<think>...</think> when the template switch `thinking` is on",
            target="lmkit_tool_parser_deepseek.formats:REASONING_V3",
            markers=("<｜Assistant｜><think></think>", "<｜Assistant｜></think>"),
        ),
    ]

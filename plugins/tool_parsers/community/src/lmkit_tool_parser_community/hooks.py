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
            name="gigachat35",
            summary='<｜GCML｜invoke name="NAME"><｜GCML｜parameter name="KEY" string="true">VALUE... (GigaChat 3.5)',
            target="lmkit_tool_parser_community.formats:GIGACHAT35",
            markers=("<｜GCML｜tool_calls>",),
        ),
        ToolParserSpec(
            name="dots2",
            summary='<dots_function_call><invoke name="NAME"><parameter name="KEY">VALUE</parameter>... (dots 2)',
            target="lmkit_tool_parser_community.formats:DOTS2",
            markers=("<dots_function_call>",),
        ),
        ToolParserSpec(
            name="solar2",
            summary="<|tool_call:start|>NAME<|tool_arg:start|>KEY<|tool_arg:value|>VALUE... (Solar Open 2)",
            target="lmkit_tool_parser_community.formats:SOLAR2",
            markers=("<|tool_call:start|>",),
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
        ToolParserSpec(
            name="functionary_v31",
            summary="<function=NAME>{...}</function> (Functionary 3.1, Llama 3.1 with custom tools)",
            target="lmkit_tool_parser_community.formats:FUNCTIONARY31",
            markers=("<function=example_function_name>{",),
        ),
        ToolParserSpec(
            name="functionary_v32",
            summary=">>>NAME, a newline, {...}; content after >>>all (Functionary 3.2)",
            target="lmkit_tool_parser_community.formats:FUNCTIONARY32",
            models=("*functionary*v3.2*",),
            markers=(">>>all\\n", ">>>all\n", ">>>${recipient}"),
        ),
        ToolParserSpec(
            name="solar",
            summary="<|tool_call:begin|>ID<|tool_call:name|>NAME<|tool_call:args|>{...}<|tool_call:end|> (Solar Open)",
            target="lmkit_tool_parser_community.formats:SOLAR",
            models=("Solar*",),
            markers=("<|tool_call:begin|>",),
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
            name="solar",
            summary="<|think|>...<|end|> (Solar Open)",
            target="lmkit_tool_parser_community.formats:SOLAR_REASONING",
            models=("Solar*",),
            markers=("<|think|>",),
        ),
        ReasoningParserSpec(
            name="solar2",
            summary="<|think:start|>...<|think:end|> (Solar Open 2)",
            target="lmkit_tool_parser_community.formats:SOLAR2_REASONING",
            markers=("<|think:start|>",),
        ),
        ReasoningParserSpec(
            name="apriel",
            summary="Here are my reasoning steps: ... [BEGIN FINAL RESPONSE] ... (Apriel)",
            target="lmkit_tool_parser_community.formats:APRIEL_REASONING",
            models=("Apriel*",),
            markers=("[BEGIN FINAL RESPONSE]",),
        ),
        ReasoningParserSpec(
            name="identity",
            summary="nothing is reasoning",
            target="lmkit_tool_parser_community.formats:IDENTITY",
        ),
    ]

"""Registers the formats."""

from lmkit.api import ToolParserSpec, hookimpl


@hookimpl
def lmkit_tool_parsers() -> list[ToolParserSpec]:
    return [
        ToolParserSpec(
            name="llama3_json",
            summary='{"name": ..., "parameters": {...}}; ..., maybe after <|python_tag|> (Llama 3.1 and later)',
            target="lmkit_tool_parser_llama.formats:LLAMA3_JSON",
            markers=('{"name": function name, "parameters": dictionary',),
        ),
        ToolParserSpec(
            name="llama4_json",
            summary='{"name": ..., "parameters": {...}}; ... (Llama 4)',
            target="lmkit_tool_parser_llama.formats:LLAMA4_JSON",
        ),
        ToolParserSpec(
            name="llama4_pythonic",
            summary='[f(a=1), g(b="x")], maybe between <|python_start|> and <|python_end|> (Llama 4)',
            target="lmkit_tool_parser_llama.formats:LLAMA4_PYTHONIC",
            models=("Llama4*",),
            markers=("[func_name1(params_name1=params_value1", "[func_name1(param1=value1"),
        ),
        ToolParserSpec(
            name="pythonic",
            summary='[f(a=1), g(b="x")] (Llama 3.2)',
            target="lmkit_tool_parser_llama.formats:PYTHONIC",
        ),
    ]

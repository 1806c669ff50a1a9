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
    ]

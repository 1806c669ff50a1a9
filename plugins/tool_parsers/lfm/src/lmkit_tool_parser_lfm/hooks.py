"""Registers the formats."""

from lmkit.api import ToolParserSpec, hookimpl


@hookimpl
def lmkit_tool_parsers() -> list[ToolParserSpec]:
    return [
        ToolParserSpec(
            name="lfm2",
            summary="<|tool_call_start|>[f(a=1)]<|tool_call_end|> (LFM 2)",
            target="lmkit_tool_parser_lfm.formats:LFM2",
            models=("Lfm2*",),
            markers=("<|tool_call_start|>", "<|tool_list_start|>"),
        ),
    ]

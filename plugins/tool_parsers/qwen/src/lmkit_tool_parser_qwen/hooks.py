"""Registers the formats."""

from lmkit.api import ReasoningParserSpec, Tier, ToolParserSpec, hookimpl


@hookimpl
def lmkit_tool_parsers() -> list[ToolParserSpec]:
    return [
        ToolParserSpec(
            name="qwen3_json",
            summary='<tool_call>{"name": ..., "arguments": {...}}</tool_call> (Qwen 3)',
            target="lmkit_tool_parser_qwen.formats:QWEN3_JSON",
        ),
        ToolParserSpec(
            name="qwen3_coder",
            summary="<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call> (Qwen 3 Coder)",
            target="lmkit_tool_parser_qwen.formats:QWEN3_CODER",
            models=("*Qwen3-Coder*",),
            markers=("<tool_call>\\n<function=", "<tool_call>\n<function="),
            tier=Tier.REFERENCE,  # other families write it too, some with rules of their own
        ),
        ToolParserSpec(
            name="qwen3_xml",
            summary="another name of qwen3_coder",
            target="lmkit_tool_parser_qwen.formats:QWEN3_XML",
        ),
    ]


@hookimpl
def lmkit_reasoning_parsers() -> list[ReasoningParserSpec]:
    return [
        ReasoningParserSpec(
            name="qwen3",
            summary="<think>...</think>, which may be missing before a call (Qwen 3, QwQ)",
            target="lmkit_tool_parser_qwen.formats:QWEN3",
            models=("Qwen3*", "QwQ*"),
        ),
    ]

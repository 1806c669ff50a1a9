"""Registers the formats."""

from lmkit.api import ReasoningParserSpec, ToolParserSpec, hookimpl


@hookimpl
def lmkit_tool_parsers() -> list[ToolParserSpec]:
    return [
        ToolParserSpec(
            name="command_r",
            summary='Action: ```json [{"tool_name": ..., "parameters": {...}}] ``` (Command R, R+)',
            target="lmkit_tool_parser_cohere.formats:COMMAND_R",
            markers=("Action: ```json", "Write 'Action:' followed by"),
        ),
        ToolParserSpec(
            name="cohere_command",
            summary='<|START_ACTION|>[{"tool_call_id": ..., "tool_name": ..., "parameters": {...}}]<|END_ACTION|>',
            target="lmkit_tool_parser_cohere.formats:COMMAND",
            markers=("<|START_ACTION|>",),
        ),
        ToolParserSpec(
            name="cohere_command3",
            summary='<|START_ACTION|>[{"tool_call_id": ..., "tool_name": ..., "parameters": {...}}]<|END_ACTION|>',
            target="lmkit_tool_parser_cohere.formats:COMMAND",
        ),
        ToolParserSpec(
            name="cohere_command4",
            summary='<|START_ACTION|>[{"tool_call_id": ..., "tool_name": ..., "parameters": {...}}]<|END_ACTION|>',
            target="lmkit_tool_parser_cohere.formats:COMMAND",
        ),
    ]


@hookimpl
def lmkit_reasoning_parsers() -> list[ReasoningParserSpec]:
    return [
        ReasoningParserSpec(
            name="cohere",
            summary="<|START_THINKING|>...<|END_THINKING|>",
            target="lmkit_tool_parser_cohere.formats:REASONING",
            markers=("<|START_THINKING|>",),
        ),
        ReasoningParserSpec(
            name="cohere_command3",
            summary="<|START_THINKING|>...<|END_THINKING|>",
            target="lmkit_tool_parser_cohere.formats:REASONING",
        ),
        ReasoningParserSpec(
            name="cohere_command4",
            summary="<|START_THINKING|>...<|END_THINKING|>",
            target="lmkit_tool_parser_cohere.formats:REASONING",
        ),
    ]

"""Registers the formats."""

from lmkit.api import ReasoningParserSpec, ToolParserSpec, hookimpl


@hookimpl
def lmkit_tool_parsers() -> list[ToolParserSpec]:
    return [
        ToolParserSpec(
            name="seed_oss",
            summary="<seed:tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></seed:tool_call>",
            target="lmkit_tool_parser_seed.formats:SEED_OSS",
            models=("SeedOss*",),
            markers=("<seed:tool_call>",),
        ),
    ]


@hookimpl
def lmkit_reasoning_parsers() -> list[ReasoningParserSpec]:
    return [
        ReasoningParserSpec(
            name="seed_oss",
            summary="<seed:think>...</seed:think>",
            target="lmkit_tool_parser_seed.formats:REASONING",
            models=("SeedOss*",),
            markers=("<seed:think>",),
        ),
    ]

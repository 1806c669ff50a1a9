"""Registers the tool-call format `lines`."""

from lmkit.api import ToolParserSpec, hookimpl


@hookimpl
def lmkit_tool_parsers():
    yield ToolParserSpec(
        name="lines",
        interface=1,
        summary='@get_weather, then a line `city = "Paris"` for each argument, then @end',
        target="lmkit_tool_parser_lines.format:Lines",
        models=("*-Lines-*",),  # globs of model names and architectures for which `auto` takes it
        markers=("\n@end",),  # texts in a chat template that give the format away
    )

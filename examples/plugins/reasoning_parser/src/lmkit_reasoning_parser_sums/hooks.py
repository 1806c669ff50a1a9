"""Registers the reasoning format `sums`."""

from lmkit.api import ReasoningParserSpec, hookimpl


@hookimpl
def lmkit_reasoning_parsers():
    yield ReasoningParserSpec(
        name="sums",
        interface=1,
        summary="17 + 25 = 42: what stands before the equals sign is reasoning",
        target="lmkit_reasoning_parser_sums.format:Sums",
        models=("*-Sums-*",),  # globs of model names and architectures for which `auto` takes it
    )

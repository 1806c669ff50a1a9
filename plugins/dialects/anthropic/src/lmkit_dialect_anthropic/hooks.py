"""Registers the dialect `anthropic`."""

from collections.abc import Iterable

from lmkit.api import DialectSpec, hookimpl


@hookimpl
def lmkit_dialects() -> Iterable[DialectSpec]:
    yield DialectSpec(
        name="anthropic",
        summary="the Anthropic Messages API: /v1/messages, streamed and whole, and counting its tokens",
        target="lmkit_dialect_anthropic.dialect:Anthropic",
    )

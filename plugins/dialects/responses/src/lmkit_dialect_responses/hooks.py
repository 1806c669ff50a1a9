"""Registers the dialect `responses`."""

from collections.abc import Iterable

from lmkit.api import DialectSpec, hookimpl


@hookimpl
def lmkit_dialects() -> Iterable[DialectSpec]:
    yield DialectSpec(
        name="responses",
        summary="the OpenAI Responses API: /v1/responses, streamed and whole, kept for a while, and counted",
        target="lmkit_dialect_responses.dialect:Responses",
        options="lmkit_dialect_responses.options:Options",
    )

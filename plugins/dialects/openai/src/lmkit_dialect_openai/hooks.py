"""Registers the dialect `openai`."""

from lmkit.api import DialectSpec, hookimpl


@hookimpl
def lmkit_dialects():
    yield DialectSpec(
        name="openai",
        summary="the OpenAI API: /v1/chat/completions and /v1/completions",
        target="lmkit_dialect_openai.dialect:OpenAI",
        stability="stable",
    )

"""Registers the dialect `tokens`."""

from lmkit.api import DialectSpec, hookimpl


@hookimpl
def lmkit_dialects():
    yield DialectSpec(
        name="tokens",
        summary="token ids in, token ids out: /inference/v1/generate, and routes that render prompts",
        target="lmkit_dialect_tokens.dialect:Tokens",
    )

"""Registers the dialect `ollama`."""

from lmkit.api import DialectSpec, hookimpl


@hookimpl
def lmkit_dialects():
    yield DialectSpec(
        name="ollama",
        summary="the Ollama API: /api/chat, /api/generate, /api/embed, and what clients ask of models",
        target="lmkit_dialect_ollama.dialect:Ollama",
    )

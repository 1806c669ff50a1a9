"""Registers the dialect `ask` and its options. Its routes are served beside all others."""

from dataclasses import dataclass

from lmkit.api import DialectSpec, hookimpl


@dataclass(frozen=True, slots=True)
class Options:
    """--dialect.ask.tokens"""

    tokens: int = 256  # of an answer, at most

    def __post_init__(self):
        if self.tokens < 1:
            raise ValueError(f"tokens is {self.tokens}, needs at least 1")


@hookimpl
def lmkit_dialects():
    yield DialectSpec(
        name="ask",
        interface=1,
        summary="POST /ask with a question; the answer as JSON, or as a line of JSON for each piece",
        target="lmkit_dialect_ask.dialect:Ask",
        options="lmkit_dialect_ask.hooks:Options",
    )

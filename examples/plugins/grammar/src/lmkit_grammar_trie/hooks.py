"""Registers the grammar backend `trie` and the structured output `inline`. Light: neither numpy nor the targets are
imported here."""

from lmkit.api import GrammarBackendSpec, StructuredOutputSpec, Tier, hookimpl


@hookimpl
def lmkit_grammars():
    yield GrammarBackendSpec(
        name="trie",
        interface=1,
        summary="Choices: one of some given texts",
        target="lmkit_grammar_trie.backend:Trie",
        kinds=frozenset({"choice"}),  # all that it compiles; other kinds go to other backends
        tier=Tier.REFERENCE,  # lmkit's own backends are asked first, unless a request names this one
    )


@hookimpl
def lmkit_structured_outputs():
    yield StructuredOutputSpec(
        name="inline",
        interface=1,
        summary="Grammars compiled in a thread of the engine's process",
        target="lmkit_grammar_trie.output:Inline",
        tier=Tier.REFERENCE,
    )

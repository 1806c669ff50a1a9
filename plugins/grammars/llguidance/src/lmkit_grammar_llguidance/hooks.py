"""Registers the grammar backend `llguidance`."""

from lmkit.api import GrammarBackendSpec, Tier, hookimpl


@hookimpl
def lmkit_grammars():
    yield GrammarBackendSpec(
        name="llguidance",
        summary="JSON schema, regex, choice, Lark and structural tags by llguidance: compiles in milliseconds",
        target="lmkit_grammar_llguidance.backend:LlGuidance",
        tier=Tier.OPTIMIZED,
        kinds=frozenset({"json_schema", "json_object", "regex", "choice", "ebnf", "lark", "structural_tag"}),
    )

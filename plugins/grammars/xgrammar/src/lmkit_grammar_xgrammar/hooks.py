"""Registers the grammar backend `xgrammar`."""

from lmkit.api import GrammarBackendSpec, Tier, hookimpl


@hookimpl
def lmkit_grammars():
    yield GrammarBackendSpec(
        name="xgrammar",
        summary="JSON schema, regex, choice, EBNF and structural tags by xgrammar; its wheel brings Triton",
        target="lmkit_grammar_xgrammar.backend:XGrammar",
        tier=Tier.PORTABLE,
        kinds=frozenset({"json_schema", "json_object", "regex", "choice", "ebnf", "structural_tag"}),
        requires=("xgrammar>=0.2",),
    )

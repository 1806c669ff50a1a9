"""Compilers of constraints on the output; chosen per request by `Grammar.kind`.

Example, entry point `[project.entry-points."lmkit.grammar"] tiny = "toy_grammar.hooks"`::

    from lmkit.api import GrammarBackendSpec, hookimpl


    @hookimpl
    def lmkit_grammars():
        yield GrammarBackendSpec(
            name="tiny", summary="Choices only", target="toy_grammar.backend:Tiny",
            kinds=frozenset({"choice"}),
        )
"""

from __future__ import annotations

from dataclasses import dataclass

from lmkit.contracts.specs import SelectRequest, Spec
from lmkit.kinds.base import Kind


@dataclass(frozen=True, slots=True, kw_only=True)
class GrammarBackendSpec(Spec):
    """target: a GrammarBackend class."""

    kinds: frozenset[str]  # Grammar.kind values it compiles


KIND = Kind(
    "grammar",
    spec=GrammarBackendSpec,
    hook="lmkit_grammars",
    used_by="lmkit.engine.build",
    ask=lambda known: [SelectRequest(kind="grammar")],
    takes="all",
    doc=__doc__,
)

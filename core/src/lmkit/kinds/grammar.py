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
from typing import TYPE_CHECKING, Protocol

from lmkit.contracts.specs import SelectRequest, Spec
from lmkit.kinds.base import Kind

if TYPE_CHECKING:
    from lmkit.contracts.params import Grammar
    from lmkit.contracts.scheduling import CompiledGrammar


class GrammarBackend(Protocol):
    """Compiles constraints. Constructed as target(vocabulary, **options), in the engine and in a process for compiling.

    `compile` runs in that process, under limits of time and memory; `load` in the engine, with what `compile` returned,
    and before that in that process, too, where a short walk over the masks shows what it takes and that it works.
    """

    kinds: frozenset[str]  # Grammar.kind values it compiles; as in the spec

    def compile(self, grammar: Grammar) -> bytes:
        """Raises GrammarError with the reason. What cannot be enforced to the letter is refused, never ignored."""

    def load(self, compiled: bytes) -> CompiledGrammar:
        """Quick, and thread-safe."""


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

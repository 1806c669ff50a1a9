"""What binds outputs to grammars, and thinking to its budget: it runs the grammar backends and masks tokens.

Example, entry point `[project.entry-points."lmkit.structured_output"] mine = "toy_output.hooks"`::

    from lmkit.api import StructuredOutputSpec, hookimpl


    @hookimpl
    def lmkit_structured_outputs():
        yield StructuredOutputSpec(name="mine", summary="Choices only", target="toy_output.output:Output")
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from lmkit.contracts.specs import SelectRequest, Spec
from lmkit.kinds.base import Kind

if TYPE_CHECKING:
    from lmkit.contracts.errors import ErrorInfo
    from lmkit.contracts.params import Grammar
    from lmkit.contracts.scheduling import CompiledGrammar
    from lmkit.contracts.wire import GrammarMasks, StepPlan, StepResult


class StructuredOutput(Protocol):
    """Constrained output of all requests of an engine. Made by
    `target(backends: Sequence[Choice], open_vocabulary: Callable[[], Vocabulary], max_rows: int)`, where `max_rows` is
    the number of rows of logits that a step may make (0: no tokens are proposed).

    All methods are called from the engine's thread.
    """

    broken: Sequence[tuple[str, ErrorInfo]]  # requests that `fill` found to be beyond help, until the core takes them

    def gate(self, request: Any) -> Any:
        """A Gate that opens when the grammar of the request is compiled, and fails with the reason when it cannot be.
        `request` has `id`, `params`, `tokens`, `num_prompt_tokens` and `epoch`. Raises EngineBusy."""

    def concerns(self, plan: StepPlan) -> bool:
        """Whether `fill` must know all tokens before this step."""

    def fill(self, plan: StepPlan) -> GrammarMasks | None:
        """The masks of a step: 32 tokens in each int32 of a row; None: nothing is forbidden."""

    def propose(self, plan: StepPlan, result: StepResult) -> None:
        """Puts tokens that must follow into `result.drafts`, before the scheduler takes the result in."""

    def release(self, ids: Iterable[str]) -> None:
        """Requests that have ended, constrained or not. Idempotent."""

    def compile(self, grammar: Grammar, seconds: float) -> CompiledGrammar:
        """Compiles and waits: for tools beside the engine. Raises GrammarError."""

    def close(self) -> None:
        """Idempotent. What is being compiled stays undone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputSpec(Spec):
    """target: makes a StructuredOutput."""


KIND = Kind(
    "structured_output",
    spec=StructuredOutputSpec,
    hook="lmkit_structured_outputs",
    used_by="lmkit.engine.build",
    ask=lambda known: [SelectRequest(kind="structured_output")],
    takes="offered",
    doc=__doc__,
)

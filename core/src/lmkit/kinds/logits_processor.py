"""What changes logits or probabilities of the rows whose requests ask for it: `params.extra[name]`.

Example, entry point `[project.entry-points."lmkit.logits_processor"] ban = "toy_ban.hooks"`::

    from lmkit.api import LogitsProcessorSpec, hookimpl


    @hookimpl
    def lmkit_logits_processors():
        yield LogitsProcessorSpec(name="ban", summary="Never these tokens", target="toy_ban.processor:Ban")
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from lmkit.contracts.specs import SelectRequest, Spec
from lmkit.kinds.base import Kind

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from lmkit.contracts.params import SamplingParams


@dataclass(slots=True)
class SampleContext:
    """What a logits processor may read."""

    slots: Sequence[int]  # slot of each row of the logits
    positions: Sequence[int]  # position of the token being drawn
    tokens: Callable[[int], Sequence[int]]  # row of the logits -> all tokens before the one being drawn


class LogitsProcessor(Protocol):
    """State of rows by their slots, in the worker. Constructed as target(**options).

    It sees only rows whose request names it. What is in `params.extra[name]` was checked by `options` before.
    """

    stage: Literal["logits", "probs"]  # before penalties, or after truncation: see the order of the sampler
    keeps_argmax: bool  # may be skipped for greedy rows
    options: type | None  # dataclass whose construction checks params.extra[name]; of the class, not of an instance

    def add(self, slot: int, params: SamplingParams, prompt: Sequence[int]) -> bool:
        """False = not interested in this row."""

    def remove(self, slot: int) -> None: ...
    def apply(self, logits: Tensor, ctx: SampleContext) -> None:
        """In place; logits [S, V] float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitsProcessorSpec(Spec):
    """target: a LogitsProcessor class. Requests know it by the spec's name."""


KIND = Kind(
    "logits_processor",
    spec=LogitsProcessorSpec,
    hook="lmkit_logits_processors",
    used_by="lmkit.engine.build",
    ask=lambda known: [SelectRequest(kind="logits_processor")],
    takes="all",
    doc=__doc__,
)

"""Guesses of the tokens that follow. The model verifies them in its next step, so that a step yields several tokens.

Example, entry point `[project.entry-points."lmkit.proposer"] again = "toy_again.hooks"`::

    from lmkit.api import ProposerSpec, hookimpl


    @hookimpl
    def lmkit_proposers():
        yield ProposerSpec(name="again", summary="The last token once more", target="toy_again.proposer:Again")
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from lmkit.contracts.errors import ConfigError
from lmkit.contracts.specs import Ref, SelectRequest, Spec
from lmkit.kinds.base import Kind, Known

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from torch import Tensor

    from lmkit.contracts.execution import StepInputs
    from lmkit.contracts.model import ModelInfo


class Proposer(Protocol):
    """Constructed as target(**options), in the worker, and asked after each step. What it says never changes what is
    drawn: a guess counts if it is the token that is drawn at its place."""

    def propose(self, texts: Sequence[np.ndarray], most: Sequence[int]) -> list[list[int]]:
        """At most `most[i]` tokens that may follow `texts[i]`, which is [n] int32, all of a row; [] = no idea."""
        ...


class DraftProposer(Protocol):
    """A proposer that runs a model of its own, the draft. Constructed as target(draft, model, **options).

    The draft's layers stand behind the model's: they have blocks of the row, and run over the tokens of each step with
    its plans, then over guesses, one token of each row at a time. Where a guess has no place left the row gets none.
    What they hold may be wrong, where the prefix cache gave blocks or a guess was: that costs guesses only.
    """

    reads_hidden: bool  # it reads at each place the model's hidden state there, and the token that follows

    def enter(self, token_ids: Tensor, hidden: Tensor | None) -> Tensor | None:
        """What enters the layers in place of embeddings: [T, D], or None.

        `hidden` [T, H]: the model's hidden states in a step (`Model.forward`), then those that `state` gave.
        """
        ...

    def state(self, x: StepInputs) -> Tensor:
        """The draft's hidden states of `x.logits_rows` [S, D], or of all tokens [T, D]; a pure function, as a model's."""
        ...

    def guess(self, state: Tensor) -> Tensor:
        """The tokens that follow, likeliest first: [S, D] -> [S, K]. A draft without layers guesses no others."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ProposerSpec(Spec):
    """target: a Proposer class, or a DraftProposer class where there is `draft`.

    draft: (Checkpoint and ModelInfo of the model, the options) -> where the draft's checkpoint is, and what is laid over
    its config.json. Torch-free.
    """

    draft: Ref | None = None


def ask(known: Known) -> list[SelectRequest]:
    """None is needed unless the user names one. No proposer declares that it can take recurrent state back."""
    if known.config.wants("proposer") in ("auto", "none"):
        return []
    found = {"recurrent": known.info.recurrent, "pooling": known.info.pooler is not None}
    return [SelectRequest(kind="proposer", features=frozenset(name for name, holds in found.items() if holds))]


def check_draft(draft: ModelInfo, info: ModelInfo, length: int) -> None:
    """Raises ConfigError where `draft` cannot guess for the model `info` in rows of `length` tokens."""
    fix = "name another draft, or leave --proposer out"
    if draft.vocab_size != info.vocab_size:
        raise ConfigError(f"the draft has {draft.vocab_size} tokens, the model {info.vocab_size}", fix=fix)
    if draft.recurrent or not draft.causal:
        raise ConfigError(f"the draft {draft.architecture} keeps what a wrong guess cannot be taken out of", fix=fix)
    if draft.max_length < length:
        what = f"the draft was made for {draft.max_length} tokens, rows may have {length}"
        raise ConfigError(what, fix=f"--max-length {draft.max_length}")


KIND = Kind(
    "proposer",
    spec=ProposerSpec,
    hook="lmkit_proposers",
    used_by="lmkit_worker.worker",
    ask=ask,
    needs=("dtype",),
    setting="sched.proposer",
    words="guesses tokens that the model verifies, several a step: none (the default), ngram, ...",
    doc=__doc__,
)

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

    from lmkit.contracts.model import ModelInfo

OTHER = "name another draft, or leave --proposer out"


class Proposer(Protocol):
    """Constructed as target(**options), in the worker, and asked after each step. What it says never changes what is
    drawn: a guess counts if it is the token that is drawn at its place."""

    def propose(self, texts: Sequence[np.ndarray], most: Sequence[int]) -> list[list[int]]:
        """At most `most[i]` tokens that may follow `texts[i]`, which is [n] int32, all of a row; [] = no idea."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProposerSpec(Spec):
    """target: a Proposer class; with `draft`, a `lmkit_layers.DraftProposer` class, which runs a model of its own."""

    draft: Ref | None = None  # (Checkpoint, ModelInfo, options) -> where it is, and changes to its config.json


def ask(known: Known) -> list[SelectRequest]:
    """None is needed unless the user names one. No proposer declares that it can take recurrent state back."""
    if known.config.wants("proposer") in ("auto", "none"):
        return []
    found = {"recurrent": known.info.recurrent, "pooling": known.info.pooler is not None}
    return [SelectRequest(kind="proposer", features=frozenset(name for name, holds in found.items() if holds))]


def check_draft(draft: ModelInfo, info: ModelInfo, length: int) -> None:
    """Raises ConfigError where `draft` cannot guess for the model `info` in rows of `length` tokens."""
    if draft.vocab_size != info.vocab_size:
        raise ConfigError(f"the draft has {draft.vocab_size} tokens, the model {info.vocab_size}", fix=OTHER)
    if draft.recurrent or not draft.causal:
        raise ConfigError(
            f"a wrong guess cannot be taken out of the state of the draft {draft.architecture}", fix=OTHER
        )
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
    lacking={
        "recurrent": "a wrong guess must be taken out of the state of the model's recurrent layers again",
        "pooling": "a pooling model generates no tokens that could be guessed",
    },
    words="guesses tokens that the model verifies, several a step: none (the default), ngram, ...",
    doc=__doc__,
)

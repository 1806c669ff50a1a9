"""Readers of tokenizers, chosen by the names of the files that lie with a checkpoint.

Example, entry point `[project.entry-points."lmkit.tokenizer"] toy = "toy_tokens.hooks"`::

    from lmkit.api import TokenizerSpec, hookimpl


    @hookimpl
    def lmkit_tokenizers():
        yield TokenizerSpec(
            name="toy", summary="Reads vocabulary.toy", target="toy_tokens.tokenizer:ToyTokenizer",
            files=("vocabulary.toy",),
        )
"""

from __future__ import annotations

from dataclasses import dataclass

from lmkit.contracts.refusal import Refusal
from lmkit.contracts.specs import SelectRequest, Spec
from lmkit.kinds.base import Kind, Refusals, listed


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerSpec(Spec):
    """target: (path: Path, *, eos_token_ids: Sequence[int], **options) -> Tokenizer. Raises CheckpointError."""

    files: tuple[str, ...]  # names of the files it needs, all of them; ".toy": it reads checkpoints that are one such


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerRequest(SelectRequest):
    """What readers of tokenizers are asked for."""

    kind: str = "tokenizer"
    files: frozenset[str]  # names of what lies in the tokenizer's folder, or the suffix where it is a file

    def facts(self) -> dict[str, object]:
        return {}


def refusals(spec: TokenizerSpec, request: TokenizerRequest) -> Refusals:
    if missing := set(spec.files) - request.files:
        yield Refusal("format", listed(missing), "a folder without")


KIND = Kind(
    "tokenizer",
    spec=TokenizerSpec,
    hook="lmkit_tokenizers",
    used_by="lmkit.text.side",
    request=TokenizerRequest,
    refusals=refusals,
    needs=("files",),
    ask=lambda known: [TokenizerRequest(files=known.files)],
    takes="offered",
    doc=__doc__,
)

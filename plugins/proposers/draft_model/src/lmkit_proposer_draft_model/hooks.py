"""Registers the proposer `draft_model`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lmkit.api import Checkpoint, ConfigError, ModelInfo, ProposerSpec, Tier, hookimpl

NAME = "--proposer.draft_model.model"


@dataclass(frozen=True, slots=True)
class Options:
    """Options of proposer.draft_model."""

    model: str = ""  # the smaller checkpoint: a directory, or what else --model takes


def draft(checkpoint: Checkpoint, info: ModelInfo, options: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Contract: ProposerSpec.draft. Vocabularies are compared where both are files on this machine."""
    ref = str(options["model"])
    if not ref:
        raise ConfigError("the proposer draft_model needs a checkpoint that guesses", fix=f"{NAME} DIRECTORY")
    own, other = _tokens(checkpoint.path), _tokens(Path(ref).expanduser())
    if own is not None and other is not None and own != other:
        fix = "name a draft of the same family, or leave --proposer out"
        num = sum(own.get(token) != id for token, id in other.items())
        raise ConfigError(f"{num} of the {len(other)} tokens of {ref} mean others in {checkpoint.ref}", fix=fix)
    return ref, {}


def _tokens(folder: Path) -> dict[str, int] | None:
    """The vocabulary in tokenizer.json, if one can be read there: token -> id."""
    try:
        found = json.loads((folder / "tokenizer.json").read_bytes())["model"]["vocab"]
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


@hookimpl
def lmkit_proposers() -> Iterable[ProposerSpec]:
    yield ProposerSpec(
        name="draft_model",
        summary="What a smaller checkpoint with the same vocabulary goes on with",
        target="lmkit_proposer_draft_model.proposer:DraftModel",
        draft="lmkit_proposer_draft_model.hooks:draft",
        options="lmkit_proposer_draft_model.hooks:Options",
        tier=Tier.OPTIMIZED,
    )

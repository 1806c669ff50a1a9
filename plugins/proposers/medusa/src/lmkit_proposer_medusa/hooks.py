"""Registers the proposer `medusa` and the model that it runs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from lmkit.api import Checkpoint, ConfigError, ModelInfo, ModelSpec, ProposerSpec, Tier, hookimpl

FOLDER = "medusa"


@dataclass(frozen=True, slots=True)
class Options:
    """Options of proposer.medusa."""

    model: str = ""  # the heads: a directory, or what else --model takes; "": the folder `medusa` of the checkpoint


def draft(checkpoint: Checkpoint, info: ModelInfo, options: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Contract: ProposerSpec.draft."""
    own = checkpoint.path / FOLDER
    ref = str(options["model"]) or (str(own) if (own / "config.json").is_file() else "")
    if not ref:
        raise ConfigError(
            f"the proposer medusa needs heads, {checkpoint.ref} has none in a folder {FOLDER!r}",
            fix="--proposer.medusa.model DIRECTORY",
        )
    target = {key: getattr(info, key) for key in ("hidden_size", "vocab_size", "max_length", "dtype")}
    return ref, {"architectures": ["MedusaForCausalLM"], "lmkit_target": target}


@hookimpl
def lmkit_proposers() -> Iterable[ProposerSpec]:
    yield ProposerSpec(
        name="medusa",
        summary="What Medusa heads make of the last hidden state: each guesses another token",
        target="lmkit_proposer_medusa.proposer:Medusa",
        draft="lmkit_proposer_medusa.hooks:draft",
        options="lmkit_proposer_medusa.hooks:Options",
        tier=Tier.OPTIMIZED,
    )


@hookimpl
def lmkit_models() -> Iterable[ModelSpec]:
    yield ModelSpec(
        name="medusa",
        summary="Medusa heads, which guess for another model",
        target="lmkit_proposer_medusa.arch:MedusaArchitecture",
        architectures=("MedusaForCausalLM",),
        features=frozenset({"causal"}),
    )

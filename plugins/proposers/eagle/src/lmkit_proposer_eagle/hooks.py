"""Registers the proposer `eagle` and the model that it runs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from lmkit.api import Checkpoint, ConfigError, ModelInfo, ModelSpec, ProposerSpec, Tier, hookimpl

from lmkit_proposer_eagle.arch import children

FOLDER = "eagle"


@dataclass(frozen=True, slots=True)
class Options:
    """Options of proposer.eagle."""

    model: str = ""  # the head: a directory, or what else --model takes; "": the folder `eagle` of the checkpoint
    tree: str = ""  # "4,2,1": so many guesses follow each at each depth, the likeliest are verified; "": chains


def draft(checkpoint: Checkpoint, info: ModelInfo, options: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Contract: ProposerSpec.draft."""
    own = checkpoint.path / FOLDER
    ref = str(options["model"]) or (str(own) if (own / "config.json").is_file() else "")
    if not ref:
        raise ConfigError(
            f"the proposer eagle needs a head, {checkpoint.ref} has none in a folder {FOLDER!r}",
            fix="--proposer.eagle.model DIRECTORY",
        )
    target = {"hidden_size": info.hidden_size, "num_layers": len(info.layers), "max_length": info.max_length}
    target["tree"] = bool(children(str(options["tree"])))
    return ref, {"architectures": ["EagleForCausalLM"], "lmkit_target": target}


@hookimpl
def lmkit_proposers() -> Iterable[ProposerSpec]:
    yield ProposerSpec(
        name="eagle",
        summary="What an EAGLE head makes of the model's hidden states",
        target="lmkit_proposer_eagle.proposer:Eagle",
        draft="lmkit_proposer_eagle.hooks:draft",
        options="lmkit_proposer_eagle.hooks:Options",
        tier=Tier.OPTIMIZED,
    )


@hookimpl
def lmkit_models() -> Iterable[ModelSpec]:
    yield ModelSpec(
        name="eagle",
        summary="Heads of EAGLE-1 and EAGLE-3, which guess for another model",
        target="lmkit_proposer_eagle.arch:EagleArchitecture",
        architectures=("EagleForCausalLM",),
        features=frozenset({"causal"}),
    )

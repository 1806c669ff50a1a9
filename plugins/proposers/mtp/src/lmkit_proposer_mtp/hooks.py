"""Registers the proposer `mtp`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from lmkit.api import Checkpoint, ConfigError, ModelInfo, ProposerSpec, Tier, hookimpl

MODEL, LAYER = "ForCausalLM", "MTP"  # endings of names: FooMTP guesses for FooForCausalLM


def draft(checkpoint: Checkpoint, info: ModelInfo, options: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Contract: ProposerSpec.draft. The draft is in the checkpoint itself."""
    name = checkpoint.architecture
    if not name.endswith(MODEL):
        fix = "name another proposer, or leave --proposer out"
        raise ConfigError(f"the proposer mtp serves models named ...{MODEL}, this one is {name}", fix=fix)
    return str(checkpoint.path), {"architectures": [name.removesuffix(MODEL) + LAYER]}


@hookimpl
def lmkit_proposers() -> Iterable[ProposerSpec]:
    yield ProposerSpec(
        name="mtp",
        summary="What the checkpoint's own layer for further tokens says",
        target="lmkit_proposer_mtp.proposer:Mtp",
        draft="lmkit_proposer_mtp.hooks:draft",
        tier=Tier.OPTIMIZED,
    )

"""Makes the reference `demo` mean the checkpoint in this package."""

from __future__ import annotations

import json
from pathlib import Path

from lmkit.api import Checkpoint, CheckpointOptions, hookimpl

DIRECTORY = Path(__file__).parent / "checkpoint"


@hookimpl
def lmkit_resolve_checkpoint(ref: str, options: CheckpointOptions) -> Checkpoint | None:
    """The packaged checkpoint for `demo`, None for any other reference."""
    if ref != "demo":
        return None
    weights = DIRECTORY / "model.safetensors"
    return Checkpoint(
        ref=ref,
        path=DIRECTORY,
        format="safetensors",
        config=json.loads((DIRECTORY / "config.json").read_text()),
        generation_config=json.loads((DIRECTORY / "generation_config.json").read_text()),
        files=(weights,),
        nbytes=weights.stat().st_size,
    )

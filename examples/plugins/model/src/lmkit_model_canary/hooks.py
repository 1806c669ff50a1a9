"""Registers the architecture CanaryForCausalLM, and the references canary:FOLDER. Light: neither torch nor the
architecture is imported here. As the group lmkit.extension names this module, too, its hook is heard before any
model is chosen."""

import json
from pathlib import Path

from lmkit.api import Checkpoint, CheckpointError, ModelSpec, hookimpl


@hookimpl
def lmkit_models():
    yield ModelSpec(
        name="canary",
        interface=1,
        summary="Canary models: Llama's layers, queries, keys and values in one tensor",
        target="lmkit_model_canary.arch:Canary",
        architectures=("CanaryForCausalLM",),  # as in config.json; each has an entry point
        features=frozenset({"causal"}),  # of attention, that any of them needs
    )


@hookimpl
def lmkit_resolve_checkpoint(ref, options):
    """canary:FOLDER, where the family's own tools leave their files: canary.json in place of config.json. None: the
    next plugin is asked, and in the end lmkit itself, which reads folders and names of repositories."""
    if not ref.startswith("canary:"):
        return None
    folder = Path(ref.removeprefix("canary:")).expanduser()
    try:
        config = json.loads((folder / "canary.json").read_text())
    except (OSError, ValueError) as e:
        raise CheckpointError(f"{folder} is no folder of a canary: {e}", fix="name one with canary.json") from None
    files = tuple(sorted(folder.glob("*.safetensors")))
    return Checkpoint(
        ref=ref,
        path=folder,
        format="safetensors",
        config={**config, "architectures": ["CanaryForCausalLM"]},
        files=files,
        nbytes=sum(file.stat().st_size for file in files),
    )

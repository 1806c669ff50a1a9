"""Registration. Light: the implementation is imported when it is chosen."""

from lmkit.api import ModelSpec, hookimpl


@hookimpl
def lmkit_models() -> list[ModelSpec]:
    return [
        ModelSpec(
            name="mamba",
            summary="Mamba, Mamba 2, Falcon Mamba, Bamba and Jamba",
            target="lmkit_model_mamba.arch:MambaFamily",
            architectures=(
                "MambaForCausalLM",
                "Mamba2ForCausalLM",
                "FalconMambaForCausalLM",
                "BambaForCausalLM",
                "JambaForCausalLM",
            ),
            features=frozenset({"causal"}),
        ),
    ]

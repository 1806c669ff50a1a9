"""Registration. Light: the implementation is imported when it is chosen."""

from lmkit.api import ModelSpec, hookimpl


@hookimpl
def lmkit_models() -> list[ModelSpec]:
    return [
        ModelSpec(
            name="mamba",
            summary="Mamba, Mamba 2 and Falcon Mamba",
            target="lmkit_model_mamba.arch:MambaFamily",
            architectures=("MambaForCausalLM", "Mamba2ForCausalLM", "FalconMambaForCausalLM"),
            features=frozenset(),
            supports_tp=False,
        ),
    ]

"""Registration. Light: the implementation is imported when it is chosen."""

from lmkit.api import ModelSpec, hookimpl


@hookimpl
def lmkit_models() -> list[ModelSpec]:
    return [
        ModelSpec(
            name="starcoder2",
            summary="StarCoder2",
            target="lmkit_model_starcoder2.arch:Starcoder2",
            architectures=("Starcoder2ForCausalLM",),
            features=frozenset({"causal", "sliding_window"}),
        ),
    ]

"""Registration. Light: the implementation is imported when it is chosen."""

from lmkit.api import ModelSpec, hookimpl


@hookimpl
def lmkit_models() -> list[ModelSpec]:
    return [
        ModelSpec(
            name="afmoe",
            summary="AFMoE (Trinity)",
            target="lmkit_model_afmoe.arch:Afmoe",
            architectures=("AfmoeForCausalLM",),
            features=frozenset({"causal", "sliding_window"}),
        ),
    ]

"""Registration. Light: the implementation is imported when it is chosen."""

from lmkit.api import ModelSpec, hookimpl


@hookimpl
def lmkit_models() -> list[ModelSpec]:
    return [
        ModelSpec(
            name="stablelm",
            summary="StableLM",
            target="lmkit_model_stablelm.arch:Stablelm",
            architectures=(
                "StableLmForCausalLM",
                "OrionForCausalLM",
            ),
            features=frozenset({"causal"}),
        ),
    ]

"""Registration. Light: the implementation is imported when it is chosen."""

from lmkit.api import ModelSpec, hookimpl


@hookimpl
def lmkit_models() -> list[ModelSpec]:
    return [
        ModelSpec(
            name="apertus",
            summary="Apertus",
            target="lmkit_model_apertus.arch:Apertus",
            architectures=("ApertusForCausalLM",),
            features=frozenset({"causal"}),
        ),
    ]

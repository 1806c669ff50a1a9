"""Registration. Light: the implementation is imported when it is chosen."""

from lmkit.api import ModelSpec, hookimpl


@hookimpl
def lmkit_models() -> list[ModelSpec]:
    return [
        ModelSpec(
            name="falcon",
            summary="Falcon",
            target="lmkit_model_falcon.arch:Falcon",
            architectures=("FalconForCausalLM",),
            features=frozenset({"causal"}),
        ),
    ]

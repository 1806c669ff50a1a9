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
            features=frozenset({"causal", "alibi"}),
        ),
        ModelSpec(
            name="falcon_h1",
            summary="Falcon-H1: Mamba 2 beside attention",
            target="lmkit_model_falcon.h1:FalconH1",
            architectures=("FalconH1ForCausalLM",),
            features=frozenset({"causal"}),
        ),
    ]

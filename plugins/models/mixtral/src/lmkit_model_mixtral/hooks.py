"""Registration. Light: the implementation is imported when it is chosen."""

from lmkit.api import ModelSpec, hookimpl


@hookimpl
def lmkit_models() -> list[ModelSpec]:
    return [
        ModelSpec(
            name="mixtral",
            summary="Mixtral and Phi-MoE",
            target="lmkit_model_mixtral.arch:Mixtral",
            architectures=(
                "MixtralForCausalLM",
                "PhimoeForCausalLM",
                "PhiMoEForCausalLM",
            ),
            features=frozenset({"causal", "sliding_window"}),
        ),
    ]

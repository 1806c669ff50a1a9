"""Registration. Light: the implementation is imported when it is chosen."""

from lmkit.api import ModelSpec, hookimpl


@hookimpl
def lmkit_models() -> list[ModelSpec]:
    return [
        ModelSpec(
            name="glm",
            summary="GLM-4, dense and with experts",
            target="lmkit_model_glm.arch:Glm",
            architectures=(
                "GlmForCausalLM",
                "Glm4ForCausalLM",
                "Glm4MoeForCausalLM",
            ),
            features=frozenset({"causal"}),
        ),
    ]

"""Registration. Light: the implementation is imported when it is chosen."""

from lmkit.api import ModelSpec, hookimpl


@hookimpl
def lmkit_models() -> list[ModelSpec]:
    return [
        ModelSpec(
            name="glm",
            summary="GLM-4 and ChatGLM, dense and with experts, and Ling",
            target="lmkit_model_glm.arch:Glm",
            architectures=(
                "GlmForCausalLM",
                "Glm4ForCausalLM",
                "Glm4MoeForCausalLM",
                "Glm4MoeMTP",
                "BailingMoeForCausalLM",
                "BailingMoeV2ForCausalLM",
                "ChatGLMModel",
                "ChatGLMForConditionalGeneration",
            ),
            features=frozenset({"causal"}),
        ),
    ]

"""Registration. Light: the implementation is imported when it is chosen."""

from lmkit.api import ModelSpec, hookimpl


@hookimpl
def lmkit_models() -> list[ModelSpec]:
    return [
        ModelSpec(
            name="llama",
            summary="Llama, Mistral and the many models built like them",
            target="lmkit_model_llama.arch:Llama",
            architectures=(
                "LlamaForCausalLM",
                "MistralForCausalLM",
                "MinistralForCausalLM",
                "Ministral3ForCausalLM",
                "Mistral3ForConditionalGeneration",
                "SmolLM3ForCausalLM",
                "ArceeForCausalLM",
                "SeedOssForCausalLM",
                "CwmForCausalLM",
                "HeliumForCausalLM",
                "Jais2ForCausalLM",
                "InternLM3ForCausalLM",
                "IQuestCoderForCausalLM",
                "MiniCPMForCausalLM",
                "LLaMAForCausalLM",
            ),
            features=frozenset({"causal", "sliding_window"}),
        ),
        ModelSpec(
            name="internlm2",
            summary="InternLM2 and InternLM2.5",
            target="lmkit_model_llama.internlm2:InternLM2",
            architectures=("InternLM2ForCausalLM",),
            features=frozenset({"causal"}),
        ),
    ]

"""Registration. Light: the implementation is imported when it is chosen."""

from lmkit.api import ModelSpec, hookimpl


@hookimpl
def lmkit_models() -> list[ModelSpec]:
    return [
        ModelSpec(
            name="deepseek",
            summary="DeepSeek V1 to V3.2, GLM-5, Kimi K2, GLM-4.7 Flash, Youtu and MiniCPM3",
            target="lmkit_model_deepseek.arch:Deepseek",
            architectures=(
                "DeepseekV2ForCausalLM",
                "DeepseekV3ForCausalLM",
                "DeepseekV3MTP",
                "DeepseekV32ForCausalLM",
                "GlmMoeDsaForCausalLM",
                "DeepseekForCausalLM",
                "Glm4MoeLiteForCausalLM",
                "YoutuForCausalLM",
                "MiniCPM3ForCausalLM",
                "Mistral4ForCausalLM",
            ),
            features=frozenset({"causal", "mla"}),
        ),
        ModelSpec(
            name="mistral_large3",
            summary="Mistral Large 3 under Mistral's own names",
            target="lmkit_model_deepseek.mistral:MistralLarge3",
            architectures=("MistralLarge3ForCausalLM",),
            features=frozenset({"causal", "mla"}),
        ),
        ModelSpec(
            name="longcat",
            summary="LongCat Flash: two blocks of attention a layer, and a mixture on a shortcut",
            target="lmkit_model_deepseek.longcat:Longcat",
            architectures=("LongcatFlashForCausalLM",),
            supports_pp=False,
            features=frozenset({"causal", "mla"}),
        ),
    ]

"""Registration. Light: the implementation is imported when it is chosen."""

from lmkit.api import ModelSpec, hookimpl


@hookimpl
def lmkit_models() -> list[ModelSpec]:
    return [
        ModelSpec(
            name="qwen",
            summary="Qwen2, Qwen3 and MiMo, dense and with experts",
            target="lmkit_model_qwen.arch:Qwen",
            architectures=(
                "Qwen2ForCausalLM",
                "Qwen3ForCausalLM",
                "Qwen2MoeForCausalLM",
                "Qwen3MoeForCausalLM",
                "MiMoForCausalLM",
                "MiMoMTP",
                "Qwen2VLForConditionalGeneration",
                "Qwen2_5_VLForConditionalGeneration",
                "Qwen3VLForConditionalGeneration",
            ),
            features=frozenset({"causal", "sliding_window"}),
        ),
        ModelSpec(
            name="qwen_hybrid",
            summary="Qwen3-Next and Qwen3.5: gated delta nets, and attention in some layers",
            target="lmkit_model_qwen.arch:Qwen",
            architectures=(
                "Qwen3NextForCausalLM",
                "Qwen3_5ForCausalLM",
                "Qwen3_5MoeForCausalLM",
                "Qwen3_5ForConditionalGeneration",
                "Qwen3_5MoeForConditionalGeneration",
            ),
            features=frozenset({"causal"}),
        ),
    ]

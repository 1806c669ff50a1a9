"""Registration. Light: the implementation is imported when it is chosen."""

from lmkit.api import ModelSpec, hookimpl


@hookimpl
def lmkit_models() -> list[ModelSpec]:
    return [
        ModelSpec(
            name="qwen",
            summary="Qwen2 to Qwen3.5 and Qwen3-Next, dense and with experts",
            target="lmkit_model_qwen.arch:Qwen",
            architectures=(
                "Qwen2ForCausalLM",
                "Qwen3ForCausalLM",
                "Qwen2MoeForCausalLM",
                "Qwen3MoeForCausalLM",
                "MiMoForCausalLM",
                "Qwen3NextForCausalLM",
                "Qwen3_5ForCausalLM",
                "Qwen3_5MoeForCausalLM",
            ),
            features=frozenset({"causal", "sliding_window"}),
        ),
    ]

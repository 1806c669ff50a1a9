"""Registration. Light: the implementation is imported when it is chosen."""

from lmkit.api import ModelSpec, hookimpl


@hookimpl
def lmkit_models() -> list[ModelSpec]:
    return [
        ModelSpec(
            name="qwen",
            summary="Qwen2, Qwen2.5 and Qwen3, dense and with experts",
            target="lmkit_model_qwen.arch:Qwen",
            architectures=(
                "Qwen2ForCausalLM",
                "Qwen3ForCausalLM",
                "Qwen2MoeForCausalLM",
                "Qwen3MoeForCausalLM",
                "MiMoForCausalLM",
            ),
            features=frozenset({"causal", "sliding_window"}),
        ),
    ]

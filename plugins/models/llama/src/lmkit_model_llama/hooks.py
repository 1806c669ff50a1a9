"""Registration. Light: the implementation is imported when it is chosen."""

from lmkit.api import ModelSpec, Tier, hookimpl


@hookimpl
def lmkit_models() -> list[ModelSpec]:
    return [
        ModelSpec(
            name="llama",
            summary="Llama and Mistral decoders (grouped-query attention, gated MLP, rotary positions)",
            target="lmkit_model_llama.arch:LlamaArchitecture",
            architectures=("LlamaForCausalLM", "MistralForCausalLM"),
            features=frozenset({"causal", "sliding_window"}),
            tier=Tier.OPTIMIZED,
        )
    ]

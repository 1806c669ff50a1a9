"""Registration. Light: the implementation is imported when it is chosen."""

from lmkit.api import ModelSpec, hookimpl


@hookimpl
def lmkit_models() -> list[ModelSpec]:
    return [
        ModelSpec(
            name="olmo",
            summary="OLMo 1 to 3, OLMoE and FlexOlmo",
            target="lmkit_model_olmo.arch:Olmo",
            architectures=("OlmoForCausalLM",),
            features=frozenset({"causal"}),
        ),
        ModelSpec(
            name="olmo2",
            summary="OLMo 1 to 3, OLMoE and FlexOlmo",
            target="lmkit_model_olmo.arch:Olmo",
            architectures=(
                "Olmo2ForCausalLM",
                "Olmo3ForCausalLM",
                "OlmoeForCausalLM",
                "FlexOlmoForCausalLM",
            ),
            features=frozenset({"causal", "sliding_window"}),
        ),
        ModelSpec(
            name="olmo_hybrid",
            summary="OLMo Hybrid: gated delta nets, and attention in some layers",
            target="lmkit_model_olmo.arch:Olmo",
            architectures=("OlmoHybridForCausalLM",),
            features=frozenset({"causal"}),
        ),
    ]

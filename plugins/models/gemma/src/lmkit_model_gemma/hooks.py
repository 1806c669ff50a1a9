"""Registration. Light: the implementation is imported when it is chosen."""

from lmkit.api import ModelSpec, hookimpl


@hookimpl
def lmkit_models() -> list[ModelSpec]:
    return [
        ModelSpec(
            name="gemma",
            summary="Gemma 1 to 3 (text) and VaultGemma",
            target="lmkit_model_gemma.arch:Gemma",
            architectures=(
                "GemmaForCausalLM",
                "Gemma2ForCausalLM",
                "Gemma3ForCausalLM",
                "Gemma3ForConditionalGeneration",
                "VaultGemmaForCausalLM",
            ),
            features=frozenset({"causal", "sliding_window", "softcap"}),
        ),
        ModelSpec(
            name="recurrent_gemma",
            summary="RecurrentGemma: recurrent units, and windowed attention in some layers",
            target="lmkit_model_gemma.arch:Gemma",
            architectures=("RecurrentGemmaForCausalLM",),
            features=frozenset({"causal", "sliding_window"}),
        ),
        ModelSpec(
            name="small-gemma",
            summary="Gemma 3n and 4 (text)",
            target="lmkit_model_gemma.small:SmallGemma",
            architectures=(
                "Gemma3nForCausalLM",
                "Gemma3nForConditionalGeneration",
                "Gemma4ForCausalLM",
                "Gemma4ForConditionalGeneration",
            ),
            supports_pp=False,
            features=frozenset({"causal", "sliding_window"}),
        ),
    ]

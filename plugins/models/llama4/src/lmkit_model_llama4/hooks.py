"""Registration. Light: the implementation is imported when it is chosen."""

from lmkit.api import ModelSpec, hookimpl


@hookimpl
def lmkit_models() -> list[ModelSpec]:
    return [
        ModelSpec(
            name="llama4",
            summary="Llama 4 (text)",
            target="lmkit_model_llama4.arch:Llama4",
            architectures=("Llama4ForCausalLM", "Llama4ForConditionalGeneration"),
            features=frozenset({"causal", "chunked"}),
        ),
    ]

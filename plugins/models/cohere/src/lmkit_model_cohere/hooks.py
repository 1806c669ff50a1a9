"""Registration. Light: the implementation is imported when it is chosen."""

from lmkit.api import ModelSpec, hookimpl


@hookimpl
def lmkit_models() -> list[ModelSpec]:
    return [
        ModelSpec(
            name="cohere",
            summary="Command-R and Command-R7B",
            target="lmkit_model_cohere.arch:Cohere",
            architectures=("CohereForCausalLM", "Cohere2ForCausalLM"),
            features=frozenset({"causal", "sliding_window"}),
        ),
    ]

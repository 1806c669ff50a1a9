"""Registration. Light: the implementation is imported when it is chosen."""

from lmkit.api import ModelSpec, hookimpl


@hookimpl
def lmkit_models() -> list[ModelSpec]:
    return [
        ModelSpec(
            name="cohere",
            summary="Command-R, Command-R7B and Command A+",
            target="lmkit_model_cohere.arch:Cohere",
            architectures=(
                "CohereForCausalLM",
                "Cohere2ForCausalLM",
                "Cohere2MoeForCausalLM",
            ),
            features=frozenset({"causal", "sliding_window"}),
        ),
    ]

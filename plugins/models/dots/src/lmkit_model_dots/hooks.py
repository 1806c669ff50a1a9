"""Registration. Light: the implementation is imported when it is chosen."""

from lmkit.api import ModelSpec, hookimpl


@hookimpl
def lmkit_models() -> list[ModelSpec]:
    return [
        ModelSpec(
            name="dots",
            summary="dots.llm1 and Solar Open",
            target="lmkit_model_dots.arch:Dots",
            architectures=(
                "Dots1ForCausalLM",
                "SolarOpenForCausalLM",
            ),
            features=frozenset({"causal", "sliding_window"}),
        ),
    ]

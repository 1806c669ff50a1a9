"""Registration. Light: the implementation is imported when it is chosen."""

from lmkit.api import ModelSpec, hookimpl


@hookimpl
def lmkit_models() -> list[ModelSpec]:
    return [
        ModelSpec(
            name="mellum",
            summary="Mellum 2",
            target="lmkit_model_mellum.arch:Mellum",
            architectures=("MellumForCausalLM",),
            features=frozenset({"causal", "sliding_window"}),
        ),
    ]

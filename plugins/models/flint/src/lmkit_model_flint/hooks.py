"""Registration. Light: the implementation is imported when it is chosen."""

from lmkit.api import ModelSpec, hookimpl


@hookimpl
def lmkit_models() -> list[ModelSpec]:
    return [
        ModelSpec(
            name="flint",
            summary="Flint",
            target="lmkit_model_flint.arch:Flint",
            architectures=("FlintForCausalLM",),
            features=frozenset({"causal", "sliding_window", "sinks"}),
        ),
    ]

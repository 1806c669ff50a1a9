"""Registration. Light: the implementation is imported when it is chosen."""

from lmkit.api import ModelSpec, hookimpl


@hookimpl
def lmkit_models() -> list[ModelSpec]:
    return [
        ModelSpec(
            name="nemotron",
            summary="Nemotron",
            target="lmkit_model_nemotron.arch:Nemotron",
            architectures=("NemotronForCausalLM",),
            features=frozenset({"causal"}),
        ),
    ]

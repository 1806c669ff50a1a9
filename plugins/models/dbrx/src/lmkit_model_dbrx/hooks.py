"""Registration. Light: the implementation is imported when it is chosen."""

from lmkit.api import ModelSpec, hookimpl


@hookimpl
def lmkit_models() -> list[ModelSpec]:
    return [
        ModelSpec(
            name="dbrx",
            summary="DBRX",
            target="lmkit_model_dbrx.arch:Dbrx",
            architectures=("DbrxForCausalLM",),
            features=frozenset({"causal"}),
        ),
    ]

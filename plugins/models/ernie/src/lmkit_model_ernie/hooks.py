"""Registration. Light: the implementation is imported when it is chosen."""

from lmkit.api import ModelSpec, hookimpl


@hookimpl
def lmkit_models() -> list[ModelSpec]:
    return [
        ModelSpec(
            name="ernie",
            summary="ERNIE 4.5, dense and with experts",
            target="lmkit_model_ernie.arch:Ernie",
            architectures=(
                "Ernie4_5ForCausalLM",
                "Ernie4_5_MoeForCausalLM",
            ),
            features=frozenset({"causal"}),
        ),
    ]

"""Registration. Light: the implementation is imported when it is chosen."""

from lmkit.api import ModelSpec, hookimpl


@hookimpl
def lmkit_models() -> list[ModelSpec]:
    return [
        ModelSpec(
            name="lfm2",
            summary="LFM2, dense and with experts",
            target="lmkit_model_lfm2.arch:Lfm2",
            architectures=("Lfm2ForCausalLM", "Lfm2MoeForCausalLM"),
            features=frozenset({"causal"}),
        ),
    ]

"""Registration. Light: the implementation is imported when it is chosen."""

from lmkit.api import ModelSpec, hookimpl


@hookimpl
def lmkit_models() -> list[ModelSpec]:
    return [
        ModelSpec(
            name="zamba",
            summary="Zamba 2: Mamba 2, and a few attention blocks that many layers share",
            target="lmkit_model_zamba.arch:Zamba",
            architectures=("Zamba2ForCausalLM",),
            features=frozenset({"causal"}),
            supports_tp=False,
            supports_pp=False,
        ),
    ]

"""Registration. Light: the implementation is imported when it is chosen."""

from lmkit.api import ModelSpec, hookimpl


@hookimpl
def lmkit_models() -> list[ModelSpec]:
    return [
        ModelSpec(
            name="kimi_linear",
            summary="Kimi Linear: delta attention in most layers, latent attention in the others, experts",
            target="lmkit_model_kimi.arch:KimiLinear",
            architectures=("KimiLinearForCausalLM",),
            features=frozenset({"causal", "mla"}),
        ),
    ]

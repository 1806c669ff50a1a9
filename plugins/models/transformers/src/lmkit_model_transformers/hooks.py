"""Registration. Light: the implementation is imported when it is chosen."""

from lmkit.api import ModelSpec, Tier, hookimpl


@hookimpl
def lmkit_models() -> list[ModelSpec]:
    return [
        ModelSpec(
            name="transformers",
            summary="Any language model of the transformers library, on lmkit's attention and KV cache",
            target="lmkit_model_transformers.arch:TransformersArchitecture",
            architectures=("transformers",),
            features=frozenset({"causal", "sliding_window", "softcap", "sinks"}),
            supports_tp=False,
            supports_pp=False,
            quantization=frozenset(),
            tier=Tier.PORTABLE,
        )
    ]

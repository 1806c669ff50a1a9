"""Registration. Light: the implementation is imported when it is chosen."""

from lmkit.api import ModelSpec, hookimpl


@hookimpl
def lmkit_models() -> list[ModelSpec]:
    return [
        ModelSpec(
            name="bloom",
            summary="BLOOM and MPT",
            target="lmkit_model_bloom.arch:Bloom",
            architectures=("BloomForCausalLM", "MptForCausalLM"),
            features=frozenset({"alibi", "causal"}),
        ),
    ]

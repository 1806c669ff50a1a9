"""Registration. Light: the implementation is imported when it is chosen."""

from lmkit.api import ModelSpec, hookimpl


@hookimpl
def lmkit_models() -> list[ModelSpec]:
    return [
        ModelSpec(
            name="bitnet",
            summary="BitNet (weights that have been unpacked)",
            target="lmkit_model_bitnet.arch:Bitnet",
            architectures=("BitNetForCausalLM",),
            features=frozenset({"causal"}),
        ),
    ]

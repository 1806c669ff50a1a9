"""Registration. Light: the implementation is imported when it is chosen."""

from lmkit.api import ModelSpec, hookimpl


@hookimpl
def lmkit_models() -> list[ModelSpec]:
    return [
        ModelSpec(
            name="nanochat",
            summary="nanochat",
            target="lmkit_model_nanochat.arch:Nanochat",
            architectures=("NanoChatForCausalLM",),
            features=frozenset({"causal"}),
        ),
    ]

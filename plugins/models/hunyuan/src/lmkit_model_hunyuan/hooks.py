"""Registration. Light: the implementation is imported when it is chosen."""

from lmkit.api import ModelSpec, hookimpl


@hookimpl
def lmkit_models() -> list[ModelSpec]:
    return [
        ModelSpec(
            name="hunyuan",
            summary="Hunyuan, dense and with experts, and HY 3",
            target="lmkit_model_hunyuan.arch:Hunyuan",
            architectures=(
                "HunYuanDenseV1ForCausalLM",
                "HunYuanMoEV1ForCausalLM",
                "HYV3ForCausalLM",
            ),
            features=frozenset({"causal"}),
        ),
    ]

"""Registration. Light: the implementation is imported when it is chosen."""

from lmkit.api import ModelSpec, hookimpl


@hookimpl
def lmkit_models() -> list[ModelSpec]:
    return [
        ModelSpec(
            name="minimax",
            summary="MiniMax-Text-01 and M2",
            target="lmkit_model_minimax.arch:Minimax",
            architectures=(
                "MiniMaxM2ForCausalLM",
                "MiniMaxForCausalLM",
            ),
            features=frozenset({"causal"}),
        ),
    ]

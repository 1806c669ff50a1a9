"""Registration. Light: the implementation is imported when it is chosen."""

from lmkit.api import ModelSpec, hookimpl


@hookimpl
def lmkit_models() -> list[ModelSpec]:
    return [
        ModelSpec(
            name="exaone",
            summary="EXAONE 3, EXAONE 4 and EXAONE MoE",
            target="lmkit_model_exaone.arch:Exaone",
            architectures=(
                "Exaone4ForCausalLM",
                "ExaoneForCausalLM",
                "ExaoneMoeForCausalLM",
                "ExaoneMoEForCausalLM",
            ),
            features=frozenset({"causal", "sliding_window"}),
        ),
    ]

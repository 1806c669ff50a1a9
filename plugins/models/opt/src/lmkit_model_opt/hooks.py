"""Registration. Light: the implementation is imported when it is chosen."""

from lmkit.api import ModelSpec, hookimpl


@hookimpl
def lmkit_models() -> list[ModelSpec]:
    return [
        ModelSpec(
            name="opt",
            summary="OPT and BioGPT",
            target="lmkit_model_opt.arch:Opt",
            architectures=("OPTForCausalLM", "BioGptForCausalLM"),
            features=frozenset({"causal"}),
        ),
    ]

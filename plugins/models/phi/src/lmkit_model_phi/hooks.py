"""Registration. Light: the implementation is imported when it is chosen."""

from lmkit.api import ModelSpec, hookimpl


@hookimpl
def lmkit_models() -> list[ModelSpec]:
    return [
        ModelSpec(
            name="phi",
            summary="Phi, Phi-3 and Phi-4",
            target="lmkit_model_phi.arch:Phi",
            architectures=("PhiForCausalLM", "Phi3ForCausalLM"),
            features=frozenset({"causal", "sliding_window"}),
        ),
    ]

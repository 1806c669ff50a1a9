"""Registration. Light: the implementation is imported when it is chosen."""

from lmkit.api import ModelSpec, hookimpl


@hookimpl
def lmkit_models() -> list[ModelSpec]:
    return [
        ModelSpec(
            name="granite",
            summary="Granite, GraniteMoE and HyperCLOVA X",
            target="lmkit_model_granite.arch:Granite",
            architectures=(
                "GraniteForCausalLM",
                "HyperCLOVAXForCausalLM",
                "GraniteSWAForCausalLM",
                "GraniteMoeForCausalLM",
                "GraniteMoeSharedForCausalLM",
                "GraniteMoeSWAForCausalLM",
            ),
            features=frozenset({"causal", "sinks", "sliding_window"}),
        ),
        ModelSpec(
            name="granite_hybrid",
            summary="Granite with Mamba 2 in most layers",
            target="lmkit_model_granite.arch:Granite",
            architectures=("GraniteMoeHybridForCausalLM",),
            features=frozenset({"causal"}),
        ),
    ]

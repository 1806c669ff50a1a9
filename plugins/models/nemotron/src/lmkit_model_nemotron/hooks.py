"""Registration. Light: the implementation is imported when it is chosen."""

from lmkit.api import ModelSpec, hookimpl


@hookimpl
def lmkit_models() -> list[ModelSpec]:
    return [
        ModelSpec(
            name="nemotron",
            summary="Nemotron",
            target="lmkit_model_nemotron.arch:Nemotron",
            architectures=("NemotronForCausalLM",),
            features=frozenset({"causal"}),
        ),
        ModelSpec(
            name="nemotron_nas",
            summary="Nemotron NAS and DeciLM: each layer has its own heads and sizes, a linear, or nothing",
            target="lmkit_model_nemotron.nas:NemotronNas",
            architectures=("DeciLMForCausalLM",),
            features=frozenset({"causal"}),
        ),
        ModelSpec(
            name="nemotron_h",
            summary="Nemotron-H: layers of Mamba 2, attention, an MLP or experts",
            target="lmkit_model_nemotron.hybrid:NemotronH",
            architectures=("NemotronHForCausalLM",),
            features=frozenset({"causal"}),
        ),
    ]

"""Registration. Light: the implementation is imported when it is chosen."""

from lmkit.api import ModelSpec, hookimpl


@hookimpl
def lmkit_models() -> list[ModelSpec]:
    return [
        ModelSpec(
            name="gpt_neox",
            summary="GPT-NeoX (Pythia), GPT-J, CodeGen and Persimmon",
            target="lmkit_model_gpt_neox.arch:GptNeox",
            architectures=("GPTNeoXForCausalLM", "GPTJForCausalLM", "CodeGenForCausalLM", "PersimmonForCausalLM"),
            features=frozenset({"causal"}),
        ),
    ]

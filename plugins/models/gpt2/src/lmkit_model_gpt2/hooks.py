"""Registration. Light: the implementation is imported when it is chosen."""

from lmkit.api import ModelSpec, hookimpl


@hookimpl
def lmkit_models() -> list[ModelSpec]:
    return [
        ModelSpec(
            name="gpt2",
            summary="GPT-2, GPT-Neo and StarCoder 1",
            target="lmkit_model_gpt2.arch:Gpt2",
            architectures=("GPT2LMHeadModel", "GPTNeoForCausalLM", "GPTBigCodeForCausalLM"),
            features=frozenset({"causal", "sliding_window"}),
        ),
    ]

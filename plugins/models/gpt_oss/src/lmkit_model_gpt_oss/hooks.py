"""Registration. Light: the implementation is imported when it is chosen."""

from lmkit.api import ModelSpec, hookimpl


@hookimpl
def lmkit_models() -> list[ModelSpec]:
    return [
        ModelSpec(
            name="gpt_oss",
            summary="gpt-oss",
            target="lmkit_model_gpt_oss.arch:GptOss",
            architectures=("GptOssForCausalLM",),
            features=frozenset({"causal", "sinks", "sliding_window"}),
        ),
    ]

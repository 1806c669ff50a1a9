"""Registration. Light: the implementation is imported when it is chosen."""

from lmkit.api import ModelSpec, hookimpl


@hookimpl
def lmkit_models() -> list[ModelSpec]:
    return [
        ModelSpec(
            name="step",
            summary="Step 3.5",
            target="lmkit_model_step.arch:Step",
            architectures=("Step3p5ForCausalLM",),
            features=frozenset({"causal", "sliding_window"}),
        ),
    ]

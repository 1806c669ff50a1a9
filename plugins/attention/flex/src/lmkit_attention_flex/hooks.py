"""Registers attention by FlexAttention. Light: torch is imported when it is chosen."""

from __future__ import annotations

from collections.abc import Iterable

from lmkit.api import ANY, AttentionSpec, Tier, hookimpl, multiple_of, one_of


@hookimpl
def lmkit_attention_backends() -> Iterable[AttentionSpec]:
    yield AttentionSpec(
        name="flex",
        summary="Paged attention by FlexAttention of torch: compiled on GPUs, step by step on CPUs",
        target="lmkit_attention_flex.backend:FlexAttention",
        requires=("torch>=2.9",),
        check="lmkit_attention_flex.check:check",
        tier=Tier.PORTABLE,
        stability="experimental",
        platforms=("cpu", "cuda", "rocm"),
        dtypes=frozenset({"float32", "bfloat16", "float16"}),
        head_dims=multiple_of(16, max=256),
        v_head_dims=multiple_of(16, max=256),
        block_sizes=one_of(16, 32, 64, 128),
        preferred_block_size=64,
        gqa_ratios=ANY,
        features=frozenset(
            {
                "causal",
                "bidirectional",
                "sliding_window",
                "chunked",
                "bidirectional_window",
                "softcap",
                "sinks",
                "alibi",
            }
        ),
    )

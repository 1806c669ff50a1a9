"""Registers attention by Triton. Light: the kernels are imported when it is chosen."""

from __future__ import annotations

from collections.abc import Iterable

from lmkit.api import ANY, AttentionSpec, Range, Tier, hookimpl, multiple_of, one_of


@hookimpl
def lmkit_attention_backends() -> Iterable[AttentionSpec]:
    yield AttentionSpec(
        name="triton",
        summary="Paged attention by Triton kernels",
        target="lmkit_attention_triton.backend:TritonAttention",
        requires=("triton>=3.2",),
        check="lmkit_attention_triton.check:check",
        tier=Tier.OPTIMIZED,
        platforms=("cuda", "rocm"),
        capability=Range((8, 0), None),
        dtypes=frozenset({"float32", "bfloat16", "float16"}),
        kv_dtypes=frozenset({"auto", "float8_e4m3fn", "float8_e5m2", "int8"}),
        head_dims=multiple_of(8, max=576),
        v_head_dims=multiple_of(8, max=512),
        block_sizes=one_of(16, 32, 64, 128),
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
                "mla",
            }
        ),
    )

"""Registration. Light: the implementation is imported when it is chosen."""

from collections.abc import Iterable

from lmkit.api import AttentionSpec, Tier, hookimpl, multiple_of

MASKS = frozenset({"causal", "bidirectional", "sliding_window", "chunked", "bidirectional_window"})
FEATURES = MASKS | {"softcap", "sinks", "alibi", "mla", "tree", "batch_invariant"}


@hookimpl
def lmkit_attention_backends() -> Iterable[AttentionSpec]:
    yield AttentionSpec(
        name="cpu",
        summary="paged attention by native kernels: split over threads, bfloat16 dot products where there are any",
        target="lmkit_attention_cpu.backend:CpuAttention",
        check="lmkit_platform_cpu.check:native",
        tier=Tier.OPTIMIZED,
        platforms=("cpu",),
        dtypes=frozenset({"float32", "bfloat16", "float16"}),
        kv_dtypes=frozenset({"auto", "float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "int8"}),
        head_dims=multiple_of(16, max=576),
        v_head_dims=multiple_of(16, max=512),
        block_sizes=multiple_of(16),
        features=FEATURES,
    )

"""Registration. Light: the implementation is imported when it is chosen."""

from lmkit.api import ANY, AttentionSpec, Tier, hookimpl


@hookimpl
def lmkit_attention_backends() -> list[AttentionSpec]:
    return [
        AttentionSpec(
            name="torch",
            summary="paged attention in plain torch: runs everywhere, the reference for every other backend",
            target="lmkit_attention_torch.backend:TorchAttention",
            tier=Tier.REFERENCE,
            stability="stable",
            platforms=("*",),
            dtypes=frozenset({"float32", "bfloat16", "float16"}),
            kv_dtypes=frozenset({"auto", "float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "int8"}),
            head_dims=ANY,
            v_head_dims=ANY,
            block_sizes=ANY,
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
                    "tree",
                }
            ),
        )
    ]

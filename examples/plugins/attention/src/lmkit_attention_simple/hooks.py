"""Registration: light, so that listing plugins imports no torch."""

from lmkit.api import AttentionSpec, Tier, hookimpl


@hookimpl
def lmkit_attention_backends():
    yield AttentionSpec(
        name="simple",
        summary="One row at a time with torch's scaled_dot_product_attention",
        target="lmkit_attention_simple.backend:SimpleAttention",
        tier=Tier.REFERENCE,
        dtypes=frozenset({"float32", "bfloat16", "float16"}),
        features=frozenset({"causal"}),
    )

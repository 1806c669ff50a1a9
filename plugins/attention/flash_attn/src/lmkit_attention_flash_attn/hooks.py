"""Registers attention by flash-attn. Light: its kernels are imported when one of the two is chosen."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from lmkit.api import ANY, AttentionSpec, Range, Tier, hookimpl, multiple_of, one_of

BOTH = frozenset({"causal", "bidirectional", "sliding_window", "bidirectional_window", "softcap"})
COMMON: dict[str, Any] = {
    "tier": Tier.OPTIMIZED,
    "stability": "experimental",
    "platforms": ("cuda",),
    "dtypes": frozenset({"float16", "bfloat16"}),
    "head_dims": multiple_of(8, max=256),
    "block_sizes": one_of(256, 512),
    "preferred_block_size": 256,
    "gqa_ratios": ANY,
}


@hookimpl
def lmkit_attention_backends() -> Iterable[AttentionSpec]:
    yield AttentionSpec(
        name="flash_attn",
        summary="Paged attention by flash-attn",
        target="lmkit_attention_flash_attn.backend:FlashAttention2",
        requires=("flash-attn>=2.6",),
        capability=Range((8, 0), None),
        features=BOTH | {"alibi"},
        **COMMON,
    )
    yield AttentionSpec(
        name="flash_attn_3",
        summary="Paged attention by flash-attn-3, for Hopper",
        target="lmkit_attention_flash_attn.backend:FlashAttention3",
        requires=("flash-attn-3",),
        capability=Range((9, 0), (10, 0)),
        features=BOTH | {"chunked"},
        **COMMON,
    )

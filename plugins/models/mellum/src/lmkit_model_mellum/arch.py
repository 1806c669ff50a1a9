"""Mellum as data: Qwen3's heads, windowed and full layers with rotary positions of their own, experts. Torch-free."""

from __future__ import annotations

from lmkit_decoders import (
    EXPERTS,
    ConfigReader,
    DecoderArchitecture,
    DecoderConfig,
    MoEConfig,
    tensor_names,
    usual_config,
)


def mellum(r: ConfigReader) -> DecoderConfig:
    bias = r.flag("attention_bias", False)
    kinds = r.layer_kinds(lambda i: "sparse", ("dense", "sparse"), "mlp_layer_types")
    moe = MoEConfig(
        num_experts=r.integer("num_local_experts", 64),
        top_k=r.integer("num_experts_per_tok", 8),
        size=r.integer("moe_intermediate_size", 896),
        layers=tuple(kind == "sparse" for kind in kinds),
        renormalize=r.flag("norm_topk_prob", True),
    )
    return usual_config(
        r,
        max_positions=131072,
        intermediate_size=r.integer("intermediate_size", 7168),
        num_kv_heads=r.integer("num_key_value_heads", 4),
        head_dim=r.integer("head_dim", 128),
        windows=r.windows(size=1024),
        rope=r.rope(500000.0, kind_of_layer="full_attention"),
        window_rope=r.rope(10000.0, kind_of_layer="sliding_attention"),
        qk_norm="head",
        qkv_bias=bias,
        o_bias=bias,
        moe=moe,
        names=tensor_names(**EXPERTS),
    )


class Mellum(DecoderArchitecture):
    configs = {"MellumForCausalLM": mellum}
    spellings = {"num_local_experts": ("num_experts",)}
    ignored = ("mtp.{any}",)  # predicts further tokens

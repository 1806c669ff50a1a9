"""OLMo 1 (norms without weights) and OLMo 2 and 3 (norms after blocks, and over all heads) as data. Torch-free."""

from __future__ import annotations

from typing import Any

from lmkit.layers import ConfigReader, DecoderArchitecture, DecoderConfig, tensor_names, usual_config

AFTER = tensor_names(
    attn_norm="",
    mlp_norm="",
    attn_post_norm=".post_attention_layernorm",
    mlp_post_norm=".post_feedforward_layernorm",
)


def olmo(r: ConfigReader) -> DecoderConfig:
    bias = r.flag("attention_bias", False)
    return usual_config(
        r,
        max_positions=2048,
        norm="layer_plain",
        norm_eps=1e-5,
        qkv_clip=r.limit("clip_qkv"),
        qkv_bias=bias,
        o_bias=bias,
    )


def olmo2(r: ConfigReader, **more: Any) -> DecoderConfig:
    bias = r.flag("attention_bias", False)
    return usual_config(
        r,
        max_positions=2048,
        placement="post",
        norm_eps=r.number("rms_norm_eps", 1e-5),
        qk_norm="whole",
        qkv_bias=bias,
        o_bias=bias,
        names=AFTER,
        **more,
    )


def olmo3(r: ConfigReader) -> DecoderConfig:
    """Scaled rotary positions, where there are any, are those of the full layers."""
    full = r.rope(500000.0, kind_of_layer="full_attention")
    local = {"rope_type": "default", "theta": full["theta"], "partial": 1.0}
    if r.per_layer_kind("rope_parameters"):
        local = r.rope(500000.0, kind_of_layer="sliding_attention")
    return olmo2(r, rope=full, window_rope=local, windows=r.windows(lambda i: (i + 1) % 4 != 0, 4096))


class Olmo(DecoderArchitecture):
    configs = {"OlmoForCausalLM": olmo, "Olmo2ForCausalLM": olmo2, "Olmo3ForCausalLM": olmo3}

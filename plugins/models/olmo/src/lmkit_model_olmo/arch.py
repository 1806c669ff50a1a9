"""OLMo 1 (norms without weights) and OLMo 2 and 3 (norms after blocks, and over all heads) as data. Torch-free."""

from __future__ import annotations

from typing import Any

from lmkit.layers import (
    EXPERTS,
    ConfigReader,
    DecoderArchitecture,
    DecoderConfig,
    MoEConfig,
    tensor_names,
    usual_config,
)


def after(**roles: str) -> dict[str, str]:
    post = {"attn_post_norm": ".post_attention_layernorm", "mlp_post_norm": ".post_feedforward_layernorm"}
    return tensor_names(attn_norm="", mlp_norm="", **post, **roles)


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
    given = {"norm_eps": r.number("rms_norm_eps", 1e-5), "names": after(), **more}
    return usual_config(
        r,
        max_positions=2048,
        placement="post",
        qk_norm="whole",
        qkv_bias=bias,
        o_bias=bias,
        **given,
    )


def olmo3(r: ConfigReader) -> DecoderConfig:
    """Scaled rotary positions, where there are any, are those of the full layers."""
    full = r.rope(500000.0, kind_of_layer="full_attention")
    local = {"rope_type": "default", "theta": full["theta"], "partial": 1.0}
    if r.per_layer_kind("rope_parameters"):
        local = r.rope(500000.0, kind_of_layer="sliding_attention")
    return olmo2(r, rope=full, window_rope=local, windows=r.windows(lambda i: (i + 1) % 4 != 0, 4096))


def olmoe(r: ConfigReader) -> DecoderConfig:
    bias = r.flag("attention_bias", False)
    return usual_config(
        r,
        max_positions=4096,
        norm_eps=r.number("rms_norm_eps", 1e-5),
        qk_norm="whole",
        qkv_clip=r.limit("clip_qkv"),
        qkv_bias=bias,
        o_bias=bias,
        moe=experts(r, 64, 8),
        names=tensor_names(**EXPERTS),
    )


def flex_olmo(r: ConfigReader) -> DecoderConfig:
    return olmo2(
        r,
        rope=r.rope(500000.0),
        norm_eps=r.number("rms_norm_eps", 1e-6),
        moe=experts(r, 7, 5),
        names=after(**EXPERTS),
    )


def experts(r: ConfigReader, num: int, top_k: int) -> MoEConfig:
    return MoEConfig(
        num_experts=r.integer("num_experts", num),
        top_k=r.integer("num_experts_per_tok", top_k),
        size=r.integer("intermediate_size"),
        layers=(True,) * r.layers(),
        renormalize=r.flag("norm_topk_prob", False),
    )


class Olmo(DecoderArchitecture):
    configs = {
        "OlmoForCausalLM": olmo,
        "Olmo2ForCausalLM": olmo2,
        "Olmo3ForCausalLM": olmo3,
        "OlmoeForCausalLM": olmoe,
        "FlexOlmoForCausalLM": flex_olmo,
    }

"""Gemma 1 to 3 (text) and VaultGemma as data. Torch-free.

All keep norm weights as a difference from 1 and scale embeddings by the square root of their size. From the second one
on, blocks have norms on both sides, logits are capped, and windowed layers alternate with full ones.
"""

from __future__ import annotations

from typing import Any

from lmkit.layers import ConfigReader, DecoderArchitecture, DecoderConfig, tensor_names, usual_config

SANDWICH = tensor_names(
    attn_post_norm=".post_attention_layernorm",
    mlp_norm=".pre_feedforward_layernorm",
    mlp_post_norm=".post_feedforward_layernorm",
)
TANH_GELU = "gelu_pytorch_tanh"


def gemma(r: ConfigReader) -> DecoderConfig:
    return usual_config(
        r,
        max_positions=8192,
        activation=r.activation("hidden_act", TANH_GELU),
        **common(r),
        num_kv_heads=r.integer("num_key_value_heads", 16),
    )


def gemma2(r: ConfigReader) -> DecoderConfig:
    return usual_config(r, max_positions=8192, placement="sandwich", names=SANDWICH, **alternating(r), **common(r))


def vault_gemma(r: ConfigReader) -> DecoderConfig:
    names = tensor_names(mlp_norm=".pre_feedforward_layernorm")
    return usual_config(r, max_positions=8192, names=names, **alternating(r), **common(r))


def gemma3(r: ConfigReader) -> DecoderConfig:
    pattern = r.integer("sliding_window_pattern", r.integer("_sliding_window_pattern", 6))
    local = {"rope_type": "default", "theta": r.number("rope_local_base_freq", 10000.0), "partial": 1.0}
    if r.per_layer_kind("rope_parameters"):
        local = r.rope(10000.0, kind_of_layer="sliding_attention")
    return usual_config(
        r,
        max_positions=131072,
        placement="sandwich",
        names=SANDWICH,
        qk_norm="head",
        rope=r.rope(1e6, kind_of_layer="full_attention"),
        window_rope=local,
        **alternating(r, pattern, softcap=None),
        **common(r),
    )


def common(r: ConfigReader) -> dict[str, Any]:
    r.one_of("use_bidirectional_attention", (None, False))
    bias = r.flag("attention_bias", False)
    return {
        "norm": "rms_offset",
        "embed_scale": r.integer("hidden_size") ** 0.5,
        "head_dim": r.integer("head_dim", 256),
        "tie": r.flag("tie_word_embeddings", True),
        "qkv_bias": bias,
        "o_bias": bias,
    }


def alternating(r: ConfigReader, pattern: int = 2, softcap: float | None = 50.0) -> dict[str, Any]:
    return {
        "windows": r.windows(lambda i: (i + 1) % pattern != 0, 4096),
        "num_kv_heads": r.integer("num_key_value_heads", 4),
        "activation": r.activation("hidden_activation", TANH_GELU),
        "attn_scale": r.number("query_pre_attn_scalar", 256) ** -0.5,
        "attn_softcap": r.limit("attn_logit_softcapping", softcap),
        "logit_softcap": r.limit("final_logit_softcapping", softcap and 30.0),
    }


class Gemma(DecoderArchitecture):
    configs = {
        "GemmaForCausalLM": gemma,
        "Gemma2ForCausalLM": gemma2,
        "Gemma3ForCausalLM": gemma3,
        "VaultGemmaForCausalLM": vault_gemma,
    }

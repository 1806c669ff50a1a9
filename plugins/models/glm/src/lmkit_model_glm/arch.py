"""GLM-4 as data: half of each head is turned, in neighbouring pairs. Torch-free."""

from __future__ import annotations

from typing import Any

from lmkit_decoders import (
    EXPERTS,
    ConfigReader,
    DecoderArchitecture,
    DecoderConfig,
    FurtherLayer,
    corrected_moe,
    tensor_names,
    usual_config,
)

from lmkit_model_glm.others import bailing, bailing_v2, chatglm


def glm(r: ConfigReader, **more: Any) -> DecoderConfig:
    given = {"names": tensor_names(gate_up=".mlp.gate_up_proj"), **more}
    return usual_config(
        r,
        max_positions=131072,
        rope=r.rope(default_partial=0.5),
        interleaved=True,
        norm_eps=r.number("rms_norm_eps", 1.5625e-7),
        num_kv_heads=r.integer("num_key_value_heads", 2),
        head_dim=r.integer("head_dim", 128),
        qkv_bias=r.flag("attention_bias", True),
        **given,
    )


def glm4(r: ConfigReader) -> DecoderConfig:
    names = tensor_names(
        gate_up=".mlp.gate_up_proj",
        attn_post_norm=".post_self_attn_layernorm",
        mlp_post_norm=".post_mlp_layernorm",
    )
    return glm(r, wiring="sandwich", names=names)


def glm4_moe(r: ConfigReader) -> DecoderConfig:
    """Turned in halves, not in neighbouring pairs."""
    first = r.count("first_k_dense_replace", 1)
    return usual_config(
        r,
        max_positions=131072,
        rope=r.rope(default_partial=0.5),
        norm_eps=r.number("rms_norm_eps", 1e-5),
        num_kv_heads=r.integer("num_key_value_heads", 8),
        qkv_bias=r.flag("attention_bias", False),
        qk_norm="head" if r.flag("use_qk_norm", False) else "",
        moe=corrected_moe(r, layers=tuple(i >= first for i in range(r.layers()))),
        num_unused_layers=r.count("num_nextn_predict_layers", 1),
        names=tensor_names(**EXPERTS),
    )


class Glm(DecoderArchitecture):
    configs = {
        "GlmForCausalLM": glm,
        "Glm4ForCausalLM": glm4,
        "Glm4MoeForCausalLM": glm4_moe,
        "BailingMoeForCausalLM": bailing,
        "BailingMoeV2ForCausalLM": bailing_v2,
        "ChatGLMModel": chatglm,
        "ChatGLMForConditionalGeneration": chatglm,
    }
    drafts = {"Glm4MoeMTP": FurtherLayer("Glm4MoeForCausalLM")}
    ignored = ("transformer.rotary_pos_emb.inv_freq",)
    defaults = {
        "Glm4MoeForCausalLM": {
            "n_routed_experts": 128, "n_shared_experts": 1, "num_experts_per_tok": 8, "moe_intermediate_size": 1408,
        },
    }  # fmt: skip
    spellings = {
        "n_routed_experts": ("num_local_experts",),
        "num_nextn_predict_layers": ("num_mtp_layers",),
    }

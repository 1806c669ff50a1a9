"""DeepSeek V2 and V3 and models built like them: latent attention, grouped routing, shared experts. Torch-free."""

from __future__ import annotations

from typing import Any

from lmkit.layers import (
    EXPERTS,
    LATENT,
    ConfigReader,
    DecoderArchitecture,
    DecoderConfig,
    corrected_moe,
    latent_config,
    tensor_names,
    usual_config,
)

NAMES = tensor_names(**LATENT, **EXPERTS)


def deepseek_v2(r: ConfigReader) -> DecoderConfig:
    """Softmax scores without correction; V2-Lite has no latent for queries."""
    grouped = r.one_of("topk_method", ("greedy", "group_limited_greedy"), "greedy") != "greedy"
    r.one_of("norm_topk_prob", (False,), False)
    r.one_of("scoring_func", ("softmax",), "softmax")
    r.one_of("mlp_bias", (False,), False)
    moe = corrected_moe(
        r,
        size=r.integer("moe_intermediate_size", 1407),
        scoring="softmax",
        correction=False,
        renormalize=False,
        num_groups=r.integer("n_group", 1) if grouped else 1,
        top_groups=r.integer("topk_group", 1) if grouped else 1,
        group_score="max",
    )
    return latent(r, 2048, moe=moe, interleaved=True)


def deepseek_v3(r: ConfigReader) -> DecoderConfig:
    r.one_of("topk_method", ("noaux_tc",), "noaux_tc")
    r.one_of("scoring_func", ("sigmoid",), "sigmoid")
    moe = corrected_moe(
        r,
        num_groups=r.integer("n_group", 8),
        top_groups=r.integer("topk_group", 4),
        scale=r.number("routed_scaling_factor", 2.5),
        layers=tuple(i >= r.count("first_k_dense_replace", 3) for i in range(r.layers())),
    )
    return latent(r, 4096, moe=moe, interleaved=r.flag("rope_interleave", True), num_unused_layers=unused(r))


def glm4_moe_lite(r: ConfigReader) -> DecoderConfig:
    first = r.count("first_k_dense_replace", 1)
    kinds = r.layer_kinds(lambda i: "dense" if i < first else "sparse", ("dense", "sparse"), "mlp_layer_types")
    moe = corrected_moe(
        r, layers=tuple(kind == "sparse" for kind in kinds), scale=r.number("routed_scaling_factor", 1.8)
    )
    return latent(
        r,
        202752,
        moe=moe,
        norm_eps=r.number("rms_norm_eps", 1e-5),
        interleaved=r.flag("rope_interleave", True),
        num_unused_layers=unused(r),
    )


def youtu(r: ConfigReader) -> DecoderConfig:
    return latent(
        r,
        131072,
        interleaved=r.flag("rope_interleave", True),
        tie=r.flag("tie_word_embeddings", True),
        mlp_bias=r.flag("mlp_bias", False),
    )


def minicpm3(r: ConfigReader) -> DecoderConfig:
    return latent(
        r,
        32768,
        norm_eps=r.number("rms_norm_eps", 1e-5),
        embed_scale=r.number("scale_emb", 12),
        residual_scale=r.number("scale_depth", 1.4) / r.layers() ** 0.5,
        logit_scale=r.number("dim_model_base", 256) / r.integer("hidden_size"),
        tie=r.flag("tie_word_embeddings", True),
        mlp_bias=r.flag("mlp_bias", False),
    )


def latent(r: ConfigReader, max_positions: int, **given: Any) -> DecoderConfig:
    r.one_of("pretraining_tp", (1,), 1)
    return usual_config(r, max_positions=max_positions, names=NAMES, **latent_config(r, r.rope()), **given)


def unused(r: ConfigReader) -> int:
    """Layers that predict further tokens; they follow the others."""
    return r.count("num_nextn_predict_layers", 1)


class Deepseek(DecoderArchitecture):
    configs = {
        "DeepseekV2ForCausalLM": deepseek_v2,
        "DeepseekV3ForCausalLM": deepseek_v3,
        "Glm4MoeLiteForCausalLM": glm4_moe_lite,
        "YoutuForCausalLM": youtu,
        "MiniCPM3ForCausalLM": minicpm3,
    }

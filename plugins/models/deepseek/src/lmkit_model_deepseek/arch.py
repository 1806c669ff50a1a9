"""DeepSeek V2 and V3 and models like them: latent attention, grouped routing, shared experts. Torch-free."""

from __future__ import annotations

from typing import Any

from lmkit.api import UnsupportedModel
from lmkit.layers import (
    EXPERTS,
    LATENT,
    ConfigReader,
    DecoderArchitecture,
    DecoderConfig,
    corrected_moe,
    latent_config,
    stacked,
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


def mistral4(r: ConfigReader) -> DecoderConfig:
    """Softmax scores; queries that grow with their position; experts whose tensors are stacked."""
    rope = r.rope(default_partial=1.0, extra=("llama_4_scaling_beta", "max_position_embeddings"))
    if rope["rope_type"] != "yarn" or "llama_4_scaling_beta" not in rope:
        raise UnsupportedModel("rope_parameters", rope["rope_type"], "yarn with llama_4_scaling_beta")
    moe = corrected_moe(r, scoring="softmax", correction=False, float32=False)
    names = EXPERTS | {"experts_up": ".mlp.experts.gate_up_proj", "experts_down": ".mlp.experts.down_proj"}
    names |= {f"expert_{p}": "" for p in ("gate", "up", "down")}
    return latent(
        r,
        1048576,
        rope=rope | {"partial": 1.0},  # of the part that is turned
        moe=moe,
        interleaved=r.flag("rope_interleave", True),
        query_growth=(rope["llama_4_scaling_beta"], rope["original_max_position_embeddings"]),
        names=tensor_names(**{**LATENT, **names}),
    )


def latent(r: ConfigReader, max_positions: int, **given: Any) -> DecoderConfig:
    r.one_of("pretraining_tp", (1,), 1)
    rope = given.pop("rope", None) or r.rope()
    return usual_config(r, **{"max_positions": max_positions, "names": NAMES, **latent_config(r, rope), **given})


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
        "Mistral4ForCausalLM": mistral4,
    }
    transforms = {"Mistral4ForCausalLM": {"experts_up": stacked, "experts_down": stacked}}

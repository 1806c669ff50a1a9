"""DeepSeek V2 and V3 and models like them: latent attention, grouped routing, shared experts. Torch-free."""

from __future__ import annotations

from typing import Any

from lmkit.api import UnsupportedModel
from lmkit_decoders import (
    EXPERTS,
    LATENT,
    ConfigReader,
    DecoderArchitecture,
    DecoderConfig,
    FurtherLayer,
    corrected_moe,
    latent_config,
    stacked,
    tensor_names,
    usual_config,
)

from lmkit_model_deepseek.defaults import DEFAULTS, GROWING

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


def deepseek_v1(r: ConfigReader) -> DecoderConfig:
    """Plain attention; softmax scores without groups, correction or scale."""
    r.one_of("scoring_func", ("softmax",), "softmax")
    every, first = r.integer("moe_layer_freq", 1), r.count("first_k_dense_replace", 0)
    bias = r.flag("attention_bias", False)
    moe = corrected_moe(
        r,
        layers=tuple(i >= first and i % every == 0 for i in range(r.layers())),
        scoring="softmax",
        correction=False,
        renormalize=r.flag("norm_topk_prob", False),
        float32=True,
        scale=1.0,
        num_groups=1,
        top_groups=1,
    )
    names = tensor_names(**EXPERTS)
    return usual_config(r, max_positions=2048, qkv_bias=bias, o_bias=bias, moe=moe, names=names)


def sparse(r: ConfigReader, max_positions: int, **given: Any) -> DecoderConfig:
    """Sparse attention: a token sees the `index_topk` tokens that a small indexer chooses, which are all of them up to
    that length. More is not served, and indexers are not loaded."""
    first, most = r.count("first_k_dense_replace", 3), r.integer("index_topk", 2048)
    kinds = r.layer_kinds(lambda i: "dense" if i < first else "sparse", ("dense", "sparse"), "mlp_layer_types")
    given["moe"] = corrected_moe(r, layers=tuple(kind == "sparse" for kind in kinds))
    made_for = r.integer("max_position_embeddings", max_positions)
    if most < made_for:
        note = f"it was made for {made_for}, but its sparse attention is run only where it sees all tokens (index_topk)"
        given["length_note"] = note
    length = min(most, made_for)
    return latent(r, max_positions, interleaved=True, num_unused_layers=unused(r), max_length=length, **given)


def deepseek_v32(r: ConfigReader) -> DecoderConfig:
    return sparse(r, 163840)


def glm_moe_dsa(r: ConfigReader) -> DecoderConfig:
    return sparse(r, 202752, norm_eps=r.number("rms_norm_eps", 1e-5))


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
    values = r.integer("v_head_dim", r.integer("hidden_size") // r.integer("num_attention_heads"))
    r = ConfigReader({**r.config, "v_head_dim": values})
    return latent(
        r,
        32768,
        norm_eps=r.number("rms_norm_eps", 1e-5),
        embed_scale=r.number("scale_emb", 12),
        residual_scale=(r.limit("scale_depth", 1.4) or r.layers() ** 0.5) / r.layers() ** 0.5,
        logit_scale=(r.limit("dim_model_base", 256) or r.integer("hidden_size")) / r.integer("hidden_size"),
        tie=r.flag("tie_word_embeddings", True),
        mlp_bias=r.flag("mlp_bias", False),
    )


def mistral4(r: ConfigReader) -> DecoderConfig:
    """Softmax scores; queries that grow with their position; experts whose tensors are stacked."""
    rope = r.rope(default_partial=1.0, extra=("llama_4_scaling_beta", "max_position_embeddings"), missing=GROWING)
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
        "DeepseekV32ForCausalLM": deepseek_v32,
        "GlmMoeDsaForCausalLM": glm_moe_dsa,
        "DeepseekForCausalLM": deepseek_v1,
        "Glm4MoeLiteForCausalLM": glm4_moe_lite,
        "YoutuForCausalLM": youtu,
        "MiniCPM3ForCausalLM": minicpm3,
        "Mistral4ForCausalLM": mistral4,
    }
    drafts = {"DeepseekV3MTP": FurtherLayer("DeepseekV3ForCausalLM")}
    ignored = ("model.layers.{i}.self_attn.indexer.{any}",)
    defaults = DEFAULTS
    spellings = {
        "qk_rope_head_dim": ("head_dim",),
        "n_routed_experts": (
            "num_experts",
            "num_local_experts",
        ),
        "num_nextn_predict_layers": ("num_mtp_layers",),
    }
    transforms = {"Mistral4ForCausalLM": {"experts_up": stacked, "experts_down": stacked}}

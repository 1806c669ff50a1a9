"""Hunyuan and HY 3 as data: Hunyuan norms heads after they have been turned. Torch-free."""

from __future__ import annotations

from typing import Any

from lmkit_decoders import (
    EXPERTS,
    ConfigReader,
    DecoderArchitecture,
    DecoderConfig,
    MoEConfig,
    corrected_moe,
    tensor_names,
    usual_config,
)

HEADS = {"q_norm": ".self_attn.query_layernorm", "k_norm": ".self_attn.key_layernorm"}
SHARED = {f"shared_{p}": f".mlp.shared_mlp.{p}_proj" for p in ("gate", "up", "down")}


def hunyuan(r: ConfigReader, **more: Any) -> DecoderConfig:
    r.one_of("pretraining_tp", (1,), 1)
    bias = r.flag("attention_bias", False)
    return usual_config(
        r,
        max_positions=2048,
        rope=rope(r),
        norm_eps=r.number("rms_norm_eps", 1e-5),
        qk_norm="head",
        qk_norm_last=True,
        qkv_bias=bias,
        o_bias=bias,
        **{"names": tensor_names(**HEADS), **more},
    )


def rope(r: ConfigReader) -> dict[str, Any]:
    """Files call a fixed stretch of the base "dynamic": theta * alpha ^ (dim / (dim - 2))."""
    found = r.rope(extra=("alpha", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"))
    dim = r.integer("head_dim", r.integer("hidden_size") // r.integer("num_attention_heads"))
    if found["rope_type"] == "dynamic" and found.get("alpha"):
        theta = found["theta"] * found["alpha"] ** (dim / (dim - 2))
        return {"rope_type": "default", "theta": theta, "partial": found["partial"]}
    return found


def hunyuan_moe(r: ConfigReader) -> DecoderConfig:
    size = r.integer("intermediate_size")
    moe = MoEConfig(
        num_experts=r.integer("num_experts", 1),
        top_k=same(r, "moe_topk", 1),
        size=size,
        layers=(True,) * r.layers(),
        float32=True,
        shared_size=size,
    )
    return hunyuan(r, moe=moe, names=tensor_names(**HEADS, **{**EXPERTS, **SHARED, "router": ".mlp.gate.wg"}))


def same(r: ConfigReader, key: str, default: int) -> int:
    """A number, or a list with that number for each layer."""
    value = r.config.get(key, default)
    if isinstance(value, list) and len(set(value)) == 1:
        value = value[0]
    return ConfigReader({key: value}).integer(key)


def hy_v3(r: ConfigReader) -> DecoderConfig:
    first = r.count("first_k_dense_replace", 1)
    kinds = r.layer_kinds(lambda i: "dense" if i < first else "sparse", ("dense", "sparse"), "mlp_layer_types")
    size, bias = r.integer("moe_intermediate_size", 1536), r.flag("attention_bias", False)
    moe = corrected_moe(
        r,
        size=size,
        num_experts=r.integer("num_experts", 192),
        top_k=r.integer("num_experts_per_tok", 8),
        layers=tuple(kind == "sparse" for kind in kinds),
        renormalize=True,
        scale=r.number("router_scaling_factor", 2.826),
        num_groups=1,
        top_groups=1,
        shared_size=size * r.count("num_shared_experts", 1),
    )
    router = {"router": ".mlp.router.gate", "correction": ".mlp.expert_bias"}
    return usual_config(
        r,
        max_positions=131072,
        rope=r.rope(11158840.0),
        norm_eps=r.number("rms_norm_eps", 1e-5),
        head_dim=r.integer("head_dim", 128),
        num_kv_heads=r.integer("num_key_value_heads", 8),
        qk_norm="head",
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=r.flag("mlp_bias", False),
        moe=moe,
        num_unused_layers=r.count("num_nextn_predict_layers", 1),
        names=tensor_names(**{**EXPERTS, **SHARED, **router}),
    )


class Hunyuan(DecoderArchitecture):
    spellings = {
        "moe_topk": ("num_experts_per_tok",),
        "num_experts": ("num_local_experts",),
    }
    configs = {
        "HunYuanDenseV1ForCausalLM": hunyuan,
        "HunYuanMoEV1ForCausalLM": hunyuan_moe,
        "HYV3ForCausalLM": hy_v3,
    }

"""Hunyuan as data: heads are normed after they have been turned. Torch-free."""

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

HEADS = {"q_norm": ".self_attn.query_layernorm", "k_norm": ".self_attn.key_layernorm"}


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
        router_float32=True,
        shared_size=size,
    )
    shared = {f"shared_{p}": f".mlp.shared_mlp.{p}_proj" for p in ("gate", "up", "down")}
    return hunyuan(r, moe=moe, names=tensor_names(**HEADS, **{**EXPERTS, **shared, "router": ".mlp.gate.wg"}))


def same(r: ConfigReader, key: str, default: int) -> int:
    """A number, or a list with that number for each layer."""
    value = r.config.get(key, default)
    if isinstance(value, list) and len(set(value)) == 1:
        value = value[0]
    return ConfigReader({key: value}).integer(key)


class Hunyuan(DecoderArchitecture):
    configs = {"HunYuanDenseV1ForCausalLM": hunyuan, "HunYuanMoEV1ForCausalLM": hunyuan_moe}

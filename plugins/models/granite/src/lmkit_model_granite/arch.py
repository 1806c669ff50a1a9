"""Granite and HyperCLOVA X as data: multipliers on embeddings, attention, residuals and logits. Torch-free.

Hybrids have Mamba 2 in most layers.
"""

from __future__ import annotations

from typing import Any

from lmkit.api import UnsupportedModel
from lmkit_decoders import (
    EACH_EXPERT,
    MAMBA,
    ConfigReader,
    DecoderArchitecture,
    DecoderConfig,
    MoEConfig,
    each_expert,
    hybrid_mamba2,
    mamba_names,
    negative_exp,
    stacked,
    tensor_names,
    usual_config,
)

OLD_KINDS = {"mamba": "linear_attention", "attention": "full_attention"}  # names of layers in older files


def granite(r: ConfigReader, **more: Any) -> DecoderConfig:
    bias = r.flag("attention_bias", False)
    given = {
        "max_positions": 2048,
        "attn_scale": r.number("attention_multiplier", 1.0),
        "logit_scale": 1 / r.number("logits_scaling", 1.0),
        **more,
    }
    return usual_config(
        r,
        embed_scale=r.number("embedding_multiplier", 1.0),
        residual_scale=r.number("residual_multiplier", 1.0),
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=r.flag("mlp_bias", False),
        **given,
    )


def hyperclovax(r: ConfigReader) -> DecoderConfig:
    post = r.flag("use_post_norm", True)
    head_dim = r.integer("head_dim", r.integer("hidden_size") // r.integer("num_attention_heads"))
    return granite(
        r,
        head_dim=head_dim,
        attn_scale=r.number("attention_multiplier", head_dim**-0.5),
        logit_scale=r.number("logits_scaling", 1.0),
        wiring="sandwich" if post else "pre",
        names=tensor_names(attn_post_norm=".post_norm1", mlp_post_norm=".post_norm2"),
    )


def granite_swa(r: ConfigReader) -> DecoderConfig:
    return granite(
        r,
        max_positions=8192,
        norm_eps=r.number("rms_norm_eps", 1e-5),
        num_kv_heads=r.integer("num_key_value_heads", 4),
        tie=r.flag("tie_word_embeddings", True),
        **windowed(r),
    )


def windowed(r: ConfigReader) -> dict[str, Any]:
    """Windowed layers with rotary bases of their own (0: no positions), and sinks."""
    windows = r.windows(lambda i: i % 4 != 0, 128)
    rope = r.rope()
    thetas = r.config.get("layer_rope_theta") or [rope["theta"]] * len(windows)
    kinds = {bool(w): {t for t, v in zip(thetas, windows, strict=False) if bool(v) == bool(w) and t} for w in windows}
    if len(thetas) != len(windows) or any(len(kind) > 1 for kind in kinds.values()):
        raise UnsupportedModel("layer_rope_theta", thetas, "one base for windowed layers and one for full ones, or 0")
    full, local = ({**rope, "theta": float(next(iter(kinds.get(w) or {rope["theta"]})))} for w in (False, True))
    return {
        "windows": windows,
        "sinks": True,
        "rope": full,
        "window_rope": local,
        "unturned": tuple(i for i, theta in enumerate(thetas) if not theta),
    }


def granite_moe(r: ConfigReader, roles: dict[str, str] | None = None, **more: Any) -> DecoderConfig:
    shared = r.count("shared_intermediate_size", 0)
    moe = MoEConfig(
        num_experts=r.integer("num_local_experts", 8),
        top_k=r.integer("num_experts_per_tok", 2),
        size=r.integer("intermediate_size"),
        layers=(True,) * r.layers(),
        shared_size=shared,
    )
    roles = {
        "router": ".block_sparse_moe.router.layer",
        **each_expert(".block_sparse_moe"),
        "experts_up": ".block_sparse_moe.input_linear.weight",
        "experts_down": ".block_sparse_moe.output_linear.weight",
        **(roles or {}),
    }
    names = tensor_names(
        **roles,
        shared_gate_up=".shared_mlp.input_linear",
        shared_down=".shared_mlp.output_linear",
    )
    return granite(r, moe=moe, names=names, **more)


def granite_moe_swa(r: ConfigReader) -> DecoderConfig:
    experts = {"experts_up": ".gate_up_proj", "experts_down": ".down_proj"}
    roles = {role: f".block_sparse_moe.experts{name}" for role, name in experts.items()}
    return granite_moe(r, {**roles, "router": ".block_sparse_moe.router"}, **windowed(r))


def granite_hybrid(r: ConfigReader) -> DecoderConfig:
    """Mamba 2 or attention; experts beside a shared MLP, or that alone."""
    r.activation(known=("silu",))  # of Mamba's convolutions, too
    kinds = r.layer_kinds(lambda i: "linear_attention", ("linear_attention", "full_attention", *OLD_KINDS))
    positions = r.one_of("position_embedding_type", (None, "nope", "rope"))
    given = {
        "rope": r.rope() if positions == "rope" else None,
        "mixer": hybrid_mamba2(r, tuple(OLD_KINDS.get(kind, kind) == "linear_attention" for kind in kinds)),
    }
    roles = mamba_names(".mamba")
    if r.count("num_local_experts", 8):
        return granite_moe(r, roles, **given)
    names = tensor_names(gate_up=".shared_mlp.input_linear", down=".shared_mlp.output_linear", **roles)
    return granite(r, intermediate_size=r.integer("shared_intermediate_size", 1024), names=names, **given)


class Granite(DecoderArchitecture):
    configs = {
        "GraniteForCausalLM": granite,
        "HyperCLOVAXForCausalLM": hyperclovax,
        "GraniteSWAForCausalLM": granite_swa,
        "GraniteMoeForCausalLM": granite_moe,
        "GraniteMoeSharedForCausalLM": granite_moe,
        "GraniteMoeSWAForCausalLM": granite_moe_swa,
        "GraniteMoeHybridForCausalLM": granite_hybrid,
    }
    models = {"GraniteMoeHybridForCausalLM": "lmkit_model_granite.model:Hybrid"}
    transforms = {
        name: {"experts_up": stacked, "experts_down": stacked, "mamba_A": negative_exp}
        for name in configs
        if "Moe" in name
    }
    defaults = {"GraniteMoeHybridForCausalLM": {"shared_intermediate_size": 1024}}
    spellings = {
        "layer_types": ("layers_block_type",),
    }
    targets = {**MAMBA, **EACH_EXPERT}

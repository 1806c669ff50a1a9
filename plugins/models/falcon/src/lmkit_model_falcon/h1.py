"""Falcon-H1 as data: Mamba 2 beside attention in every layer, and multipliers on most of what flows. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lmkit_decoders import (
    MAMBA,
    ConfigReader,
    DecoderArchitecture,
    DecoderConfig,
    hybrid_mamba2,
    mamba_names,
    negative_exp,
    tensor_names,
    usual_config,
)

NAMES = tensor_names(
    norm="model.final_layernorm",
    mlp_norm=".pre_ff_layernorm",
    **{part: f".feed_forward.{part}_proj" for part in ("gate", "up", "down")},
    **mamba_names(".mamba"),
)


class FalconH1Config(DecoderConfig):
    """Layers with a mixer have attention too, and the mixer is a part of it."""

    def attends(self, layer: int) -> bool:
        return True

    def mixer_path(self, i: int | str) -> str:
        return f"layers.{i}.attn.mixer"


def falcon_h1(r: ConfigReader) -> DecoderConfig:
    heads, bias = r.integer("num_attention_heads"), r.flag("attention_bias", False)
    head_dim = r.integer("head_dim", r.integer("hidden_size") // heads)
    first = r.flag("mamba_norm_before_gate", True)
    mixer = hybrid_mamba2(
        r,
        (True,) * r.layers(),
        r.optional("mamba_d_ssm", 1024) or 0,
        out_bias=r.flag("projectors_bias", False),
        norm=("before" if first else "after") if r.flag("mamba_rms_norm", False) else "none",
    )
    return usual_config(
        r,
        kind=FalconH1Config,
        max_positions=8192,
        num_kv_heads=r.optional("num_key_value_heads", 8) or heads,
        head_dim=head_dim,
        norm_eps=r.number("rms_norm_eps", 1e-5),
        activation=r.activation(known=("silu",)),
        embed_scale=r.number("embedding_multiplier", 1.0),
        attn_scale=head_dim**-0.5 * r.number("key_multiplier", 1.0),
        logit_scale=r.number("lm_head_multiplier", 1.0),
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=r.flag("mlp_bias", False),
        mixer=mixer,
        names=NAMES,
    )


def multipliers(r: ConfigReader) -> Mapping[str, Any]:
    """Those that no shared block knows."""

    def several(key: str, size: int) -> list[float]:
        return [1.0] * size if r.config.get(key) is None else r.numbers(key, size)

    single = ("attention_in", "attention_out", "ssm_in", "ssm_out")
    return {
        **{name: r.number(f"{name}_multiplier", 1.0) for name in single},
        "mlp": several("mlp_multipliers", 2),  # of the gate, and of what comes out
        "ssm": several("ssm_multipliers", 5),  # of gate, x, b, c and time steps
    }


class FalconH1(DecoderArchitecture):
    configs = {"FalconH1ForCausalLM": falcon_h1}
    config = FalconH1Config
    models = {"FalconH1ForCausalLM": "lmkit_model_falcon.model:FalconH1Model"}
    options = {"FalconH1ForCausalLM": multipliers}
    transforms = {"FalconH1ForCausalLM": {"mamba_A": negative_exp}}
    targets = MAMBA

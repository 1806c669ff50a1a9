"""LFM2, dense and with experts: gated short convolutions, and attention in some layers."""

from __future__ import annotations

from typing import Any

from lmkit.api import LinearSpec, StateTensor
from lmkit_decoders import (
    ConfigReader,
    DecoderArchitecture,
    DecoderConfig,
    MixerConfig,
    corrected_moe,
    tensor_names,
    usual_config,
)

NAMES = tensor_names(
    norm="model.embedding_norm",
    attn_norm=".operator_norm",
    mlp_norm=".ffn_norm",
    o=".self_attn.out_proj",
    q_norm=".self_attn.q_layernorm",
    k_norm=".self_attn.k_layernorm",
    gate=".feed_forward.w1",
    up=".feed_forward.w3",
    down=".feed_forward.w2",
    router=".feed_forward.gate",
    correction=".feed_forward.expert_bias",
    expert_gate=".feed_forward.experts.{e}.w1",
    expert_up=".feed_forward.experts.{e}.w3",
    expert_down=".feed_forward.experts.{e}.w2",
    conv=".conv.conv",
    conv_in=".conv.in_proj",
    conv_out=".conv.out_proj",
)


def short_conv(r: ConfigReader, layers: tuple[bool, ...]) -> MixerConfig:
    d, width, bias = r.integer("hidden_size"), r.kernel_width("conv_L_cache", 3), r.flag("conv_bias", False)
    return MixerConfig(
        layers=layers,
        state=(StateTensor("conv", (width - 1, d)),),
        linears=(
            LinearSpec("in_proj", d, (d, d, d), bias, "none", ("b", "c", "x"), ("conv_in",)),
            LinearSpec("out_proj", d, (d,), bias, "none", (), ("conv_out",)),
        ),
        num_parameters=d * (width + bias),
        options={"width": width, "bias": bias},
    )


def mlp_size(r: ConfigReader) -> int:
    """The width of the MLP: two thirds of what the file says, rounded up."""
    size = r.integer("block_ff_dim", r.integer("intermediate_size", 12288))
    if not r.flag("block_auto_adjust_ff_dim", True):
        return size
    size = int(r.number("block_ffn_dim_multiplier", 1.0) * int(2 * size / 3))
    multiple = r.integer("block_multiple_of", 256)
    return -(-size // multiple) * multiple


def lfm2(r: ConfigReader, **given: Any) -> DecoderConfig:
    attends = r.layer_numbers("full_attn_idxs", range(r.layers()))
    kinds = r.layer_kinds(lambda i: "full_attention" if i in attends else "conv", ("full_attention", "conv"))
    return usual_config(
        r,
        max_positions=128000,
        norm_eps=r.number("norm_eps", 1e-5),
        activation="silu",
        rope=r.rope(1000000.0),
        tie=r.flag("tie_embedding", r.flag("tie_word_embeddings", True)),
        qk_norm="head",
        mixer=short_conv(r, tuple(kind == "conv" for kind in kinds)),
        names=NAMES,
        **{"intermediate_size": mlp_size(r), **given},
    )


def lfm2_moe(r: ConfigReader) -> DecoderConfig:
    moe = corrected_moe(
        r,
        num_experts=r.integer("num_experts", 32),
        layers=tuple(i >= r.count("num_dense_layers", 2) for i in range(r.layers())),
        correction=r.flag("use_expert_bias", True),
        epsilon=1e-6,
        float32=False,
    )
    return lfm2(r, intermediate_size=r.integer("intermediate_size"), moe=moe)


class Lfm2(DecoderArchitecture):
    configs = {"Lfm2ForCausalLM": lfm2, "Lfm2MoeForCausalLM": lfm2_moe}
    models = dict.fromkeys(configs, "lmkit_model_lfm2.model:Lfm2Model")
    defaults = {key: {"num_key_value_heads": 8, "num_experts_per_tok": 4} for key in configs}
    targets = {
        "conv": "{mixer}.conv",
        "conv_in": ("{mixer}.in_proj", "*"),
        "conv_out": "{mixer}.out_proj",
    }

"""Nemotron as data: layer norms stored as a difference from 1, squared ReLU, half of each head turned. Torch-free."""

from __future__ import annotations

from lmkit_decoders import ConfigReader, DecoderArchitecture, DecoderConfig, usual_config


def nemotron(r: ConfigReader) -> DecoderConfig:
    bias = r.flag("attention_bias", False)
    return usual_config(
        r,
        max_positions=4096,
        rope=r.rope(default_partial=0.5),
        norm="layer_offset",
        norm_eps=r.number("norm_eps", 1e-5),
        activation=r.activation("hidden_act", "relu2"),
        gated=False,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=r.flag("mlp_bias", False),
    )


class Nemotron(DecoderArchitecture):
    configs = {"NemotronForCausalLM": nemotron}

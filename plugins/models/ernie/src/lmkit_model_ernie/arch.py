"""ERNIE 4.5 as data: a Llama that turns neighbouring pairs. Torch-free."""

from __future__ import annotations

from lmkit.layers import ConfigReader, DecoderArchitecture, DecoderConfig, usual_config


def ernie(r: ConfigReader) -> DecoderConfig:
    bias = r.flag("use_bias", False)
    return usual_config(
        r,
        max_positions=131072,
        rope=r.rope(500000.0),
        interleaved=True,
        num_kv_heads=r.integer("num_key_value_heads", 2),
        head_dim=r.integer("head_dim", 128),
        norm_eps=r.number("rms_norm_eps", 1e-5),
        tie=r.flag("tie_word_embeddings", True),
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=bias,
    )


class Ernie(DecoderArchitecture):
    configs = {"Ernie4_5ForCausalLM": ernie}

"""Qwen2 and Qwen3 (dense) as data. Torch-free."""

from __future__ import annotations

from lmkit.layers import ConfigReader, DecoderArchitecture, DecoderConfig, usual_config


def qwen2(r: ConfigReader) -> DecoderConfig:
    return usual_config(r, max_positions=32768, windows=windows(r), qkv_bias=True)


def qwen3(r: ConfigReader) -> DecoderConfig:
    bias = r.flag("attention_bias", False)
    return usual_config(
        r,
        max_positions=32768,
        windows=windows(r),
        head_dim=r.integer("head_dim", 128),
        qk_norm="head",
        qkv_bias=bias,
        o_bias=bias,
    )


def windows(r: ConfigReader) -> tuple[int | None, ...]:
    """Sliding window of each layer: `layer_types` where given, else layers from `max_window_layers` on."""
    sliding = r.flag("use_sliding_window", False) and r.optional("sliding_window", 4096) is not None
    first = r.count("max_window_layers", 28)
    if not sliding:  # a size without use is none
        r = ConfigReader({**r.config, "sliding_window": None})
    return r.windows(lambda i: sliding and i >= first, 4096 if sliding else None)


class Qwen(DecoderArchitecture):
    configs = {"Qwen2ForCausalLM": qwen2, "Qwen3ForCausalLM": qwen3}

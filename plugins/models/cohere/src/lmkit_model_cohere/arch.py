"""Cohere's Command models as data: attention and MLP side by side, scaled logits. Torch-free."""

from __future__ import annotations

from typing import Any

from lmkit.layers import ConfigReader, DecoderArchitecture, DecoderConfig, tensor_names, usual_config


def cohere(r: ConfigReader, **more: Any) -> DecoderConfig:
    bias = r.flag("attention_bias", False)
    given = {"rope": r.rope(500000.0), **more}
    return usual_config(
        r,
        max_positions=8192,
        placement="parallel",
        norm="layer_no_bias",
        norm_eps=r.number("layer_norm_eps", 1e-5),
        interleaved=True,
        logit_scale=r.number("logit_scale", 0.0625),
        qk_norm="each" if r.flag("use_qk_norm", False) else "",
        tie=r.flag("tie_word_embeddings", True),
        qkv_bias=bias,
        o_bias=bias,
        names=tensor_names(mlp_norm=""),
        **given,
    )


def cohere2(r: ConfigReader) -> DecoderConfig:
    windows = r.windows(lambda i: (i + 1) % r.integer("sliding_window_pattern", 4) != 0, 4096)
    unturned = tuple(i for i, window in enumerate(windows) if window is None)
    return cohere(r, rope=r.rope(), windows=windows, unturned=unturned)


class Cohere(DecoderArchitecture):
    configs = {"CohereForCausalLM": cohere, "Cohere2ForCausalLM": cohere2}

"""EXAONE 4 as data: norms after blocks; where layers have windows, full ones have no positions. Torch-free."""

from __future__ import annotations

from lmkit.layers import ConfigReader, DecoderArchitecture, DecoderConfig, tensor_names, usual_config


def exaone4(r: ConfigReader) -> DecoderConfig:
    pattern = r.config.get("sliding_window_pattern", 4)
    size = r.optional("sliding_window", 4096)
    if pattern == "LLLG":  # local and global, in older files
        pattern = 4
    elif size is not None:
        pattern = r.integer("sliding_window_pattern", 4)
    windows = r.windows(lambda i: size is not None and (i + 1) % pattern != 0, 4096)
    return usual_config(
        r,
        max_positions=2048,
        placement="post",
        norm_eps=r.number("rms_norm_eps", 1e-5),
        qk_norm="head",
        windows=windows,
        unturned=() if size is None else tuple(i for i, window in enumerate(windows) if window is None),
        names=tensor_names(
            attn_norm="",
            mlp_norm="",
            attn_post_norm=".post_attention_layernorm",
            mlp_post_norm=".post_feedforward_layernorm",
        ),
    )


class Exaone(DecoderArchitecture):
    configs = {"Exaone4ForCausalLM": exaone4}

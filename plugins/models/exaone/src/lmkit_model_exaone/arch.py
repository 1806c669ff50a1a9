"""EXAONE 4 as data: norms after blocks; where layers have windows, full ones have no positions. Torch-free."""

from __future__ import annotations

from typing import Any

from lmkit_decoders import (
    EXPERTS,
    ConfigReader,
    DecoderArchitecture,
    DecoderConfig,
    corrected_moe,
    tensor_names,
    usual_config,
)

AFTER = tensor_names(
    attn_norm="",
    mlp_norm="",
    attn_post_norm=".post_attention_layernorm",
    mlp_post_norm=".post_feedforward_layernorm",
)


def exaone3(r: ConfigReader) -> DecoderConfig:
    """A Llama under other names."""
    return usual_config(
        r,
        max_positions=2048,
        norm_eps=r.number("layer_norm_epsilon", 1e-5),
        activation=r.activation("activation_function"),
        names=tensor_names(
            "transformer.h.{i}",
            embed="transformer.wte",
            norm="transformer.ln_f",
            attn_norm=".ln_1",
            mlp_norm=".ln_2",
            **{part: f".attn.attention.{part}_proj" for part in "qkv"},
            o=".attn.attention.out_proj",
            gate=".mlp.c_fc_0",
            up=".mlp.c_fc_1",
            down=".mlp.c_proj",
        ),
    )


def exaone4(r: ConfigReader, **more: Any) -> DecoderConfig:
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
        norm_eps=r.number("rms_norm_eps", 1e-5),
        qk_norm="head",
        windows=windows,
        unturned=() if size is None else tuple(i for i, window in enumerate(windows) if window is None),
        **{"wiring": "post", "names": AFTER, **more},
    )


def exaone_moe(r: ConfigReader) -> DecoderConfig:
    """Norms before blocks."""
    first, size = r.count("first_k_dense_replace", 1), r.integer("moe_intermediate_size", 1024)
    kinds = r.layer_kinds(lambda i: "dense" if i < first else "sparse", ("dense", "sparse"), "mlp_layer_types")
    moe = corrected_moe(
        r,
        layers=tuple(kind == "sparse" for kind in kinds),
        num_experts=r.integer("num_experts", 64),
        top_k=r.integer("num_experts_per_tok", 8),
        size=size,
        shared_size=size * r.count("num_shared_experts", 1),
        scale=r.number("routed_scaling_factor", 2.5),
    )
    names = {**EXPERTS, "correction": ".mlp.e_score_correction_bias"}
    return exaone4(r, wiring="pre", moe=moe, names=tensor_names(**names))


class Exaone(DecoderArchitecture):
    configs = {
        "ExaoneForCausalLM": exaone3,
        "Exaone4ForCausalLM": exaone4,
        "ExaoneMoeForCausalLM": exaone_moe,
        "ExaoneMoEForCausalLM": exaone_moe,  # its name in released files
    }
    defaults = {
        name: {"num_key_value_heads": 32}
        for name in ("Exaone4ForCausalLM", "ExaoneMoeForCausalLM", "ExaoneMoEForCausalLM")
    }
    spellings = {"num_hidden_layers": ("num_layers",)}
    ignored = ("mtp.{any}", "transformer.h.{i}.attn.attention.rotary.inv_freq")

"""Flint as data: windowed layers with rotary positions, full ones without, sinks, experts beside a shared one.

Torch-free.
"""

from __future__ import annotations

from lmkit_decoders import (
    EXPERTS,
    ConfigReader,
    DecoderArchitecture,
    DecoderConfig,
    MoEConfig,
    tensor_names,
    usual_config,
)

SHARED = {f"shared_{p}": f".mlp.shared_expert.{p}_proj" for p in ("gate", "up", "down")}


def flint(r: ConfigReader) -> DecoderConfig:
    last, bias = r.layers() - 1, r.flag("attention_bias", False)
    windows = r.windows(lambda i: i >= 2 and i % 4 != 1 and i != last, 513)
    dense = r.layer_numbers("mlp_only_layers", (0, 1))
    r.one_of("decoder_sparse_step", (1,), 1)
    moe = MoEConfig(
        num_experts=r.integer("num_experts", 256),
        top_k=r.integer("num_experts_per_tok", 6),
        size=r.integer("moe_intermediate_size", 512),
        layers=tuple(i not in dense for i in range(r.layers())),
        scoring="sigmoid",
        renormalize=r.flag("norm_topk_prob", True),
        float32=True,
        shared_size=r.integer("shared_expert_intermediate_size", 1024),
    )
    return usual_config(
        r,
        max_positions=262144,
        intermediate_size=r.integer("intermediate_size", 6144),
        num_kv_heads=r.integer("num_key_value_heads", 4),
        head_dim=r.integer("head_dim", 128),
        windows=windows,
        unturned=tuple(i for i, window in enumerate(windows) if window is None),
        qk_norm="head",
        sinks=True,
        qkv_bias=bias,
        o_bias=bias,
        moe=moe,
        names=tensor_names(**EXPERTS | SHARED, sinks=".self_attn.softmax_offset"),
    )


class Flint(DecoderArchitecture):
    configs = {"FlintForCausalLM": flint}

"""dots.llm1 and Solar Open as data: a Llama with corrected sigmoid routing. Torch-free."""

from __future__ import annotations

from lmkit_decoders import (
    EXPERTS,
    ConfigReader,
    DecoderArchitecture,
    DecoderConfig,
    corrected_moe,
    tensor_names,
    usual_config,
)


def dots1(r: ConfigReader) -> DecoderConfig:
    bias = r.flag("attention_bias", False)
    return usual_config(
        r,
        max_positions=2048,
        windows=r.windows(lambda i: i >= r.count("max_window_layers", 62), 4096),
        qk_norm="head",
        qkv_bias=bias,
        o_bias=bias,
        moe=corrected_moe(r, renormalize=r.flag("norm_topk_prob", False)),
        names=tensor_names(**EXPERTS),
    )


def solar_open(r: ConfigReader) -> DecoderConfig:
    size = r.integer("moe_intermediate_size", 1280)
    return usual_config(
        r,
        max_positions=131072,
        intermediate_size=size,
        rope=r.rope(1e6, 1.0),
        norm_eps=r.number("rms_norm_eps", 1e-5),
        num_kv_heads=r.integer("num_key_value_heads", 8),
        head_dim=r.integer("head_dim", 128),
        qkv_bias=r.flag("attention_bias", False),
        moe=corrected_moe(r, size=size, shared_size=size * r.count("n_shared_experts", 1)),
        names=tensor_names(**EXPERTS),
    )


class Dots(DecoderArchitecture):
    configs = {"Dots1ForCausalLM": dots1, "SolarOpenForCausalLM": solar_open}
    defaults = {"Dots1ForCausalLM": {"num_key_value_heads": 32, "moe_intermediate_size": 1408}}
    defaults |= {"SolarOpenForCausalLM": {"n_routed_experts": 128, "num_experts_per_tok": 8}}
    spellings = {
        "n_routed_experts": ("num_local_experts",),
    }

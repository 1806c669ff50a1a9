"""Mixtral and Phi-MoE as data. Torch-free."""

from __future__ import annotations

from lmkit_decoders import ConfigReader, DecoderArchitecture, DecoderConfig, MoEConfig, tensor_names, usual_config

EXPERTS = {"expert_gate": "w1", "expert_down": "w2", "expert_up": "w3"}
NAMES = tensor_names(
    router=".block_sparse_moe.gate",
    **{role: f".block_sparse_moe.experts.{{e}}.{name}" for role, name in EXPERTS.items()},
)


def mixtral(r: ConfigReader) -> DecoderConfig:
    return usual_config(
        r,
        max_positions=131072,
        rope=r.rope(1e6),
        num_kv_heads=r.integer("num_key_value_heads", 8),
        norm_eps=r.number("rms_norm_eps", 1e-5),
        windows=(r.optional("sliding_window"),) * r.layers(),
        moe=experts(r, 8),
        names=NAMES,
    )


def phimoe(r: ConfigReader) -> DecoderConfig:
    r.one_of("num_experts_per_tok", (2,), 2)  # its way of choosing is defined for two
    bias = r.flag("attention_bias", False)
    return usual_config(
        r,
        max_positions=131072,
        rope=r.rope(1e6, extra=("short_mscale", "long_mscale")),
        num_kv_heads=r.integer("num_key_value_heads", 8),
        norm="layer",
        norm_eps=r.number("rms_norm_eps", 1e-5),
        windows=(r.optional("sliding_window"),) * r.layers(),
        moe=experts(r, 16),
        qkv_bias=bias,
        o_bias=bias,
        head_bias=r.flag("lm_head_bias", False),
        names=NAMES,
    )


def experts(r: ConfigReader, num: int) -> MoEConfig:
    return MoEConfig(
        num_experts=r.integer("num_local_experts", num),
        top_k=r.integer("num_experts_per_tok", 2),
        size=r.integer("intermediate_size"),
        layers=(True,) * r.layers(),
        epsilon=r.number("router_jitter_noise", 0.01) if num == 16 else 0.0,
    )


class Mixtral(DecoderArchitecture):
    configs = {"MixtralForCausalLM": mixtral, "PhimoeForCausalLM": phimoe, "PhiMoEForCausalLM": phimoe}
    spellings = {
        "num_local_experts": ("num_experts",),
    }
    models = dict.fromkeys(("PhimoeForCausalLM", "PhiMoEForCausalLM"), "lmkit_model_mixtral.model:PhiMoE")

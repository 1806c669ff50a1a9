"""AFMoE as data: gated attention, norms around blocks, positions in windowed layers only. Torch-free."""

from __future__ import annotations

from lmkit.api import LinearSpec
from lmkit_decoders import (
    EXPERTS,
    ConfigReader,
    DecoderArchitecture,
    DecoderConfig,
    MoEConfig,
    tensor_names,
    usual_config,
)


class AfmoeConfig(DecoderConfig):
    """Attention has one projection more: its gate."""

    def attention_linears(self, i: int) -> list[LinearSpec]:
        q, sources = self.num_q_heads * self.head_dim, self.sources(i, "attn_gate")
        gate = LinearSpec(f"layers.{i}.attn.gate", self.hidden_size, (q,), False, "column", (), sources)
        return [*super().attention_linears(i), gate]


def afmoe(r: ConfigReader) -> DecoderConfig:
    every, dense = r.integer("global_attn_every_n_layers", 4), r.count("num_dense_layers", 1)
    windows = r.windows(lambda i: (i + 1) % every != 0, 1024)
    size, bias = r.integer("moe_intermediate_size", 1408), r.flag("attention_bias", False)
    moe = MoEConfig(
        num_experts=r.integer("num_experts", 64),
        top_k=r.integer("num_experts_per_tok", 6),
        size=size,
        layers=tuple(i >= dense for i in range(len(windows))),
        scoring="sigmoid",
        correction=True,
        epsilon=1e-20,
        scale=r.number("route_scale", 1.0),
        shared_size=size * r.integer("num_shared_experts", 2),
    )
    return usual_config(
        r,
        kind=AfmoeConfig,
        max_positions=16384,
        windows=windows,
        unturned=tuple(i for i, window in enumerate(windows) if window is None),
        head_dim=r.integer("head_dim", 128),
        norm_eps=r.number("rms_norm_eps", 1e-5),
        wiring="sandwich",
        qk_norm="head",
        qkv_bias=bias,
        o_bias=bias,
        embed_scale=r.integer("hidden_size") ** 0.5 if r.flag("mup_enabled", False) else 1.0,
        moe=moe,
        names=tensor_names(
            attn_post_norm=".post_attention_layernorm",
            mlp_norm=".pre_mlp_layernorm",
            mlp_post_norm=".post_mlp_layernorm",
            attn_gate=".self_attn.gate_proj",
            **{**EXPERTS, "router": ".mlp.router.gate", "correction": ".mlp.expert_bias"},
        ),
    )


class Afmoe(DecoderArchitecture):
    config = AfmoeConfig
    models = {"AfmoeForCausalLM": "lmkit_model_afmoe.model:Afmoe"}
    configs = {"AfmoeForCausalLM": afmoe}

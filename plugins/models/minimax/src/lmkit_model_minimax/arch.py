"""MiniMax M2 as data: norms over all heads, half of each head turned, corrected sigmoid routing. Torch-free."""

from __future__ import annotations

from lmkit.layers import ConfigReader, DecoderArchitecture, DecoderConfig, MoEConfig, tensor_names, usual_config


def minimax_m2(r: ConfigReader) -> DecoderConfig:
    head_dim = r.integer("head_dim", 128)
    turned = r.integer("rotary_dim", head_dim) / head_dim
    moe = MoEConfig(
        num_experts=r.integer("num_local_experts", 256),
        top_k=r.integer("num_experts_per_tok", 8),
        size=r.integer("intermediate_size", 1536),
        layers=(True,) * r.layers(),
        scoring="sigmoid",
        correction=True,
    )
    experts = {f"expert_{p}": f".block_sparse_moe.experts.{{e}}.{w}" for p, w in ROLES.items()}
    return usual_config(
        r,
        max_positions=196608,
        rope=r.rope(5e6, turned),
        num_kv_heads=r.integer("num_key_value_heads", 8),
        head_dim=head_dim,
        qk_norm="whole",
        moe=moe,
        names=tensor_names(
            router=".block_sparse_moe.gate",
            correction=".block_sparse_moe.e_score_correction_bias",
            **experts,
        ),
    )


ROLES = {"gate": "w1", "down": "w2", "up": "w3"}


class Minimax(DecoderArchitecture):
    configs = {"MiniMaxM2ForCausalLM": minimax_m2}
    ignored = ("model.mtp{any}",)

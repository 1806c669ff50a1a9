"""MiniMax as data. Torch-free.

MiniMax-Text-01 has lightning attention in most layers; M2 norms over all heads, turns half of each head and corrects
the scores of its router.
"""

from __future__ import annotations

from collections.abc import Mapping

from lmkit.api import LinearSpec, StateTensor
from lmkit_decoders import (
    ConfigReader,
    DecoderArchitecture,
    DecoderConfig,
    MixerConfig,
    MoEConfig,
    split_per_head,
    tensor_names,
    usual_config,
)

EXPERTS = {
    "router": ".block_sparse_moe.gate",
    "expert_gate": ".block_sparse_moe.experts.{e}.w1",
    "expert_down": ".block_sparse_moe.experts.{e}.w2",
    "expert_up": ".block_sparse_moe.experts.{e}.w3",
}
FULL, LINEAR = "full_attention", "linear_attention"


def minimax(r: ConfigReader) -> DecoderConfig:
    r.one_of("sliding_window", (None,))
    kinds = r.layer_kinds(lambda i: LINEAR if i % 2 else FULL, (FULL, LINEAR))
    d, heads = r.integer("hidden_size"), r.integer("num_attention_heads")
    head_dim = r.integer("head_dim", d // heads)
    size = heads * head_dim
    mixer = MixerConfig(
        layers=tuple(kind == LINEAR for kind in kinds),
        state=(StateTensor("kv", (heads, head_dim, head_dim)),),
        linears=(
            LinearSpec("qkv", d, (3 * size,), sources=("lightning_qkv",)),
            LinearSpec("gate", d, (size,), sources=("lightning_gate",)),
            LinearSpec("o", size, (d,), sources=("lightning_o",)),
        ),
        num_parameters=size,
        options={},
    )
    moe = MoEConfig(
        num_experts=r.integer("num_local_experts", 8),
        top_k=r.integer("num_experts_per_tok", 2),
        size=r.integer("intermediate_size"),
        layers=(True,) * r.layers(),
    )
    return usual_config(
        r,
        max_positions=131072,
        rope=r.rope(1e6, r.integer("rotary_dim", head_dim) / head_dim),
        norm_eps=r.number("rms_norm_eps", 1e-5),
        num_kv_heads=r.integer("num_key_value_heads", 8),
        head_dim=head_dim,
        moe=moe,
        mixer=mixer,
        names=tensor_names(
            **EXPERTS,
            lightning_qkv=".self_attn.qkv_proj",
            lightning_gate=".self_attn.output_gate",
            lightning_o=".self_attn.out_proj",
            lightning_scale=".self_attn.norm",
        ),
    )


def shares(r: ConfigReader) -> Mapping[str, tuple[float, float]]:
    """What a block's input and its output count for in their sum."""
    kinds = {"linear": "linear_attn", "full": "full_attn", "mlp": "mlp"}
    return {
        kind: (r.number(f"{key}_alpha_factor", 1.0), r.number(f"{key}_beta_factor", 1.0)) for kind, key in kinds.items()
    }


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
    return usual_config(
        r,
        max_positions=196608,
        rope=r.rope(5e6, turned),
        num_kv_heads=r.integer("num_key_value_heads", 8),
        head_dim=head_dim,
        qk_norm="whole",
        moe=moe,
        names=tensor_names(**EXPERTS, correction=".block_sparse_moe.e_score_correction_bias"),
    )


class Minimax(DecoderArchitecture):
    configs = {"MiniMaxForCausalLM": minimax, "MiniMaxM2ForCausalLM": minimax_m2}
    spellings = {
        "num_local_experts": ("num_experts",),
    }
    models = {"MiniMaxForCausalLM": "lmkit_model_minimax.model:MiniMax"}
    options = {"MiniMaxForCausalLM": shares}
    transforms = {"MiniMaxForCausalLM": {"lightning_qkv": split_per_head}}
    targets = {
        "lightning_qkv": "layers.{i}.attn.qkv",
        "lightning_gate": "layers.{i}.attn.gate",
        "lightning_o": "layers.{i}.attn.o",
        "lightning_scale": "layers.{i}.attn.norm",
    }
    ignored = (
        "model.mtp{any}",
        *(f"model.layers.{{i}}.self_attn.{name}_decay" for name in ("query", "key", "diagonal")),
        "model.layers.{i}.self_attn.slope_rate",
    )

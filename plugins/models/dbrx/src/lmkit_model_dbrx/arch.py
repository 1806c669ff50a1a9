"""DBRX as data: layer norms, clipped queries, keys and values, and experts whose tensors are stacked. Torch-free."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lmkit_decoders import ConfigReader, DecoderArchitecture, DecoderConfig, MoEConfig, tensor_names

if TYPE_CHECKING:
    from torch import Tensor

NAMES = tensor_names(
    "transformer.blocks.{i}",
    embed="transformer.wte",
    norm="transformer.norm_f",
    attn_norm=".norm_attn_norm.norm_1",
    mlp_norm=".norm_attn_norm.norm_2",
    qkv=".norm_attn_norm.attn.Wqkv",
    o=".norm_attn_norm.attn.out_proj",
    router=".ffn.router.layer",
    experts_gate=".ffn.experts.mlp.w1",
    experts_up=".ffn.experts.mlp.v1",
    experts_down=".ffn.experts.mlp.w2",
)


def dbrx(r: ConfigReader) -> DecoderConfig:
    r.one_of("tie_word_embeddings", (False,), False)
    attention, ffn = r.nested("attn_config"), r.nested("ffn_config")
    ffn = ConfigReader({"moe_normalize_expert_weights": 1, **ffn.config})
    layers, hidden, heads = r.layers("n_layers"), r.integer("d_model"), r.integer("n_heads")
    size = ffn.integer("ffn_hidden_size", 3584)
    return DecoderConfig(
        vocab_size=r.integer("vocab_size"),
        hidden_size=hidden,
        intermediate_size=size,
        num_q_heads=heads,
        num_kv_heads=attention.integer("kv_n_heads", 1),
        head_dim=hidden // heads,
        windows=(None,) * layers,
        max_length=r.integer("max_seq_len", 2048),
        norm="layer_no_bias",
        norm_eps=1e-5,
        activation=activation(ffn),
        rope=r.rope(attention.number("rope_theta", 10000.0)),
        qkv_clip=attention.limit("clip_qkv"),
        moe=MoEConfig(
            num_experts=ffn.integer("moe_num_experts", 4),
            top_k=ffn.integer("moe_top_k", 1),
            size=size,
            layers=(True,) * layers,
            renormalize=ffn.one_of("moe_normalize_expert_weights", (1, None)) == 1,  # a norm's order
        ),
        names=NAMES,
    )


def activation(ffn: ConfigReader) -> str:
    if ffn.config.get("ffn_act_fn") is None:
        return "silu"
    return ffn.nested("ffn_act_fn").activation("name")


def transposed_experts(cfg: DecoderConfig, weight: Tensor) -> Tensor:
    """[E * in, out] -> [E * out, in]."""
    assert cfg.moe is not None
    return weight.unflatten(0, (cfg.moe.num_experts, -1)).transpose(1, 2).flatten(0, 1)


class Dbrx(DecoderArchitecture):
    configs = {"DbrxForCausalLM": dbrx}
    spellings = {
        "d_model": ("hidden_size",),
        "n_heads": ("num_attention_heads",),
        "n_layers": ("num_hidden_layers",),
        "max_seq_len": ("max_position_embeddings",),
    }
    transforms = {"DbrxForCausalLM": {"experts_down": transposed_experts}}

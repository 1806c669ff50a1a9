"""BLOOM and MPT as data: positions by ALiBi only. Torch-free."""

from __future__ import annotations

from typing import Any

from lmkit_decoders import ConfigReader, DecoderArchitecture, DecoderConfig, split_per_head, tensor_names, usual_config


def bloom(r: ConfigReader) -> DecoderConfig:
    r.one_of("apply_residual_connection_post_layernorm", (False,), False)
    hidden = r.integer("hidden_size", r.integer("n_embed", 64))
    return usual_config(
        r,
        **heads(hidden, r.integer("n_head", 8)),
        windows=(None,) * r.layers("n_layer"),
        max_length=r.integer("seq_length", 2048),
        norm="layer",
        norm_eps=r.number("layer_norm_epsilon", 1e-5),
        activation="gelu_new",
        embed_norm=True,
        tie=r.flag("tie_word_embeddings", True),
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
        names=tensor_names(
            "transformer.h.{i}",
            embed="transformer.word_embeddings",
            embed_norm="transformer.word_embeddings_layernorm",
            norm="transformer.ln_f",
            qkv=".self_attention.query_key_value",
            o=".self_attention.dense",
            up=".mlp.dense_h_to_4h",
            down=".mlp.dense_4h_to_h",
        ),
    )


def mpt(r: ConfigReader) -> DecoderConfig:
    attention = ConfigReader({}) if r.config.get("attn_config") is None else r.nested("attn_config")
    attention.one_of("alibi", (True,), True)
    attention.one_of("alibi_bias_max", (8,), 8)
    attention.one_of("attn_type", ("multihead_attention",), "multihead_attention")
    attention.one_of("qk_ln", (False,), False)
    attention.one_of("prefix_lm", (False,), False)
    r.one_of("expansion_ratio", (4,), 4)
    r.one_of("no_bias", (True,), True)
    return usual_config(
        r,
        **heads(r.integer("d_model", 2048), r.integer("n_heads", 16)),
        windows=(None,) * r.layers("n_layers"),
        max_length=r.integer("max_seq_len", 2048),
        norm="layer_no_bias",
        norm_eps=r.number("layer_norm_epsilon", 1e-5),
        activation="gelu",
        qkv_clip=attention.limit("clip_qkv"),
        attn_scale=attention.limit("softmax_scale"),
        tie=r.flag("tie_word_embeddings", True),
        names=tensor_names(
            "transformer.blocks.{i}",
            embed="transformer.wte",
            norm="transformer.norm_f",
            attn_norm=".norm_1",
            mlp_norm=".norm_2",
            qkv=".attn.Wqkv",
            o=".attn.out_proj",
            up=".ffn.up_proj",
            down=".ffn.down_proj",
        ),
    )


def heads(hidden: int, num: int) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "intermediate_size": 4 * hidden,
        "num_q_heads": num,
        "num_kv_heads": num,
        "head_dim": hidden // num,
        "rope": None,
        "alibi": True,
        "gated": False,
    }


class Bloom(DecoderArchitecture):
    configs = {"BloomForCausalLM": bloom, "MptForCausalLM": mpt}
    transforms = {"BloomForCausalLM": {"qkv": split_per_head}}
    spellings = {
        "n_layer": ("num_hidden_layers",),
        "n_layers": ("num_hidden_layers",),
        "n_head": ("num_attention_heads",),
        "n_heads": ("num_attention_heads",),
        "d_model": ("hidden_size",),
    }
    prefix = "transformer."

"""OPT and BioGPT as data: learned positions from the third row of their table on. Torch-free."""

from __future__ import annotations

from typing import Any

from lmkit.layers import ConfigReader, DecoderArchitecture, DecoderConfig, tensor_names, usual_config


def opt(r: ConfigReader) -> DecoderConfig:
    r.one_of("do_layer_norm_before", (True,), True)
    r.one_of("_remove_final_layer_norm", (False,), False)
    r.one_of("layer_norm_elementwise_affine", (True,), True)
    r.one_of("word_embed_proj_dim", (r.integer("hidden_size"),), r.integer("hidden_size"))
    bias = r.flag("enable_bias", True)
    return usual_config(
        r,
        **common(r, "model.decoder", "final_layer_norm", "lm_head"),
        intermediate_size=r.integer("ffn_dim", 3072),
        activation=r.activation("activation_function", "relu"),
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=bias,
    )


def biogpt(r: ConfigReader) -> DecoderConfig:
    return usual_config(
        r,
        **common(r, "biogpt", "layer_norm", "output_projection", max_positions=1024),
        intermediate_size=r.integer("intermediate_size", 4096),
        activation=r.activation("hidden_act", "gelu"),
        embed_scale=r.integer("hidden_size") ** 0.5 if r.flag("scale_embedding", True) else 1.0,
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
    )


def common(r: ConfigReader, model: str, norm: str, head: str, max_positions: int = 2048) -> dict[str, Any]:
    length, heads = r.integer("max_position_embeddings", max_positions), r.integer("num_attention_heads")
    return {
        "rope": None,
        "num_kv_heads": heads,
        "head_dim": r.integer("hidden_size") // heads,
        "max_length": length,
        "num_positions": length + 2,
        "position_offset": 2,
        "norm": "layer",
        "norm_eps": 1e-5,
        "gated": False,
        "tie": r.flag("tie_word_embeddings", True),
        "names": tensor_names(
            f"{model}.layers.{{i}}",
            embed=f"{model}.embed_tokens",
            positions=f"{model}.embed_positions",
            norm=f"{model}.{norm}",
            lm_head=head,
            attn_norm=".self_attn_layer_norm",
            mlp_norm=".final_layer_norm",
            o=".self_attn.out_proj",
            up=".fc1",
            down=".fc2",
        ),
    }


class Opt(DecoderArchitecture):
    configs = {"OPTForCausalLM": opt, "BioGptForCausalLM": biogpt}

"""Bailing (Ling, Ring) and ChatGLM 2 to 4 as data: the same blocks under other names. Torch-free."""

from __future__ import annotations

from typing import Any

from lmkit_decoders import EXPERTS, ConfigReader, DecoderConfig, corrected_moe, tensor_names, usual_config

BAILING = EXPERTS | {
    "embed": "model.word_embeddings",
    "qkv": ".attention.query_key_value",
    "o": ".attention.dense",
    "q_norm": ".attention.query_layernorm",
    "k_norm": ".attention.key_layernorm",
    "correction": ".mlp.gate.expert_bias",
}


def bailing(r: ConfigReader, **more: Any) -> DecoderConfig:
    """The first generation: softmax scores, heads turned as a whole."""
    for key in ("norm_head", "norm_softmax"):
        r.one_of(key, (False,), False)
    size = r.integer("moe_intermediate_size")
    given = {"scoring": "softmax", "correction": False, "num_groups": 1, "top_groups": 1, **more.pop("routing", {})}
    first = r.count("first_k_dense_replace", 0)
    moe = corrected_moe(
        r,
        size=size,
        num_experts=r.integer("num_experts"),
        shared_size=size * r.count("num_shared_experts", 0),
        layers=tuple(i >= first for i in range(r.layers())),
        **given,
    )
    bias = r.flag("use_bias", False)
    return usual_config(
        r,
        **{
            "max_positions": 32768,
            "qkv_bias": r.flag("use_qkv_bias", False),
            "o_bias": bias,
            "mlp_bias": bias,
            "moe": moe,
            "names": tensor_names(**BAILING),
            **more,
        },
    )


def bailing_v2(r: ConfigReader) -> DecoderConfig:
    """Corrected sigmoid scores in groups; heads are normed and turned in part."""
    r.one_of("score_function", ("sigmoid",), "sigmoid")
    correction = r.flag("moe_router_enable_expert_bias", True)
    routing = {"scoring": "sigmoid", "correction": correction, "num_groups": r.integer("n_group", 8)}
    return bailing(
        r,
        routing={**routing, "top_groups": r.integer("topk_group", 4)},
        rope=r.rope(600000.0, r.number("partial_rotary_factor", 0.5)),
        qk_norm="head" if r.flag("use_qk_norm", True) else "",
        mlp_bias=False,
        num_unused_layers=r.count("num_nextn_predict_layers", 0),
    )


def chatglm(r: ConfigReader) -> DecoderConfig:
    """Half of each head is turned, in neighbouring pairs; a few heads of keys and values."""
    for key, value in {"rmsnorm": True, "post_layer_norm": True, "original_rope": True}.items():
        r.one_of(key, (value,), value)
    r.one_of("apply_residual_connection_post_layernorm", (False,), False)
    heads, bias = r.integer("num_attention_heads"), r.flag("add_bias_linear", False)
    return usual_config(
        r,
        vocab_size=r.integer("padded_vocab_size", r.config.get("vocab_size")),
        intermediate_size=r.integer("ffn_hidden_size"),
        num_kv_heads=r.integer("multi_query_group_num", 1) if r.flag("multi_query_attention", False) else heads,
        head_dim=r.integer("kv_channels", r.integer("hidden_size") // heads),
        windows=(None,) * r.layers("num_layers"),
        max_length=r.integer("seq_length", 2048),
        norm_eps=r.number("layernorm_epsilon", 1e-5),
        activation="silu",
        rope={"rope_type": "default", "theta": 10000.0 * r.number("rope_ratio", 1.0), "partial": 0.5},
        interleaved=True,
        qkv_bias=bias or r.flag("add_qkv_bias", False),
        o_bias=bias,
        mlp_bias=bias,
        names=tensor_names(
            "transformer.encoder.layers.{i}",
            embed="transformer.embedding.word_embeddings",
            norm="transformer.encoder.final_layernorm",
            lm_head="transformer.output_layer",
            qkv=".self_attention.query_key_value",
            o=".self_attention.dense",
            gate_up=".mlp.dense_h_to_4h",
            down=".mlp.dense_4h_to_h",
        ),
    )

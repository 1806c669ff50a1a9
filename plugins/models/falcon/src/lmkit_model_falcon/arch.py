"""Falcon as data: 7B (one key-value head), 40B and 180B (grouped, two norms side by side), and sequential ones."""

from __future__ import annotations

from dataclasses import replace

from lmkit.api import AttnNeed
from lmkit_decoders import ConfigReader, DecoderArchitecture, DecoderConfig, split_per_group, tensor_names, usual_config


class FalconConfig(DecoderConfig):
    """Alibi is added before scores are scaled."""

    def need(self, layer: int) -> AttnNeed:
        return replace(super().need(layer), alibi_scale=self.head_dim**-0.5)


def falcon(r: ConfigReader) -> DecoderConfig:
    heads, hidden, bias = r.integer("num_attention_heads"), r.integer("hidden_size"), r.flag("bias", False)
    alibi = r.flag("alibi", False)
    grouped = r.flag("new_decoder_architecture", False)
    parallel = r.flag("parallel_attn", True)
    two_norms = parallel and r.one_of("num_ln_in_parallel_attn", (None, 1, 2), 2 if grouped else None) == 2
    if grouped:
        num_kv = r.integer("num_kv_heads", heads)
    else:
        num_kv = 1 if r.flag("multi_query", True) else heads
    roles = {"attn_norm": ".ln_attn", "mlp_norm": ".ln_mlp"} if two_norms else {"mlp_norm": ""} if parallel else {}
    return usual_config(
        r,
        kind=FalconConfig,
        max_positions=2048,
        intermediate_size=r.integer("ffn_hidden_size", 4 * hidden),
        num_kv_heads=num_kv,
        head_dim=hidden // heads,
        alibi=alibi,
        rope=None if alibi else r.rope(),
        wiring="parallel_two_norms" if two_norms else "parallel" if parallel else "pre",
        norm="layer",
        norm_eps=r.number("layer_norm_epsilon", 1e-5),
        activation=r.activation("activation", "gelu"),
        gated=False,
        tie=r.flag("tie_word_embeddings", True),
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=bias,
        names=tensor_names(
            "transformer.h.{i}",
            embed="transformer.word_embeddings",
            norm="transformer.ln_f",
            qkv=".self_attention.query_key_value",
            o=".self_attention.dense",
            up=".mlp.dense_h_to_4h",
            down=".mlp.dense_4h_to_h",
            **roles,
        ),
    )


class Falcon(DecoderArchitecture):
    configs = {"FalconForCausalLM": falcon}
    config = FalconConfig
    transforms = {"FalconForCausalLM": {"qkv": split_per_group}}

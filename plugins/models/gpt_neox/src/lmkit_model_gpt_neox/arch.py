"""GPT-NeoX, GPT-J, CodeGen and Persimmon as data: layer norms, partly turned heads, fused projections. Torch-free."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lmkit_decoders import ConfigReader, DecoderArchitecture, DecoderConfig, split_per_head, tensor_names, usual_config

if TYPE_CHECKING:
    from torch import Tensor


def neox(r: ConfigReader) -> DecoderConfig:
    bias = r.flag("attention_bias", True)
    r = ConfigReader({**r.config, "rope_theta": None})  # called rotary_emb_base
    return usual_config(
        r,
        max_positions=2048,
        num_kv_heads=r.integer("num_attention_heads"),
        head_dim=r.integer("hidden_size") // r.integer("num_attention_heads"),
        rope=r.rope(r.number("rotary_emb_base", 10000.0), r.number("rotary_pct", 0.25)),
        wiring="parallel_two_norms" if r.flag("use_parallel_residual", True) else "pre",
        norm="layer",
        norm_eps=r.number("layer_norm_eps", 1e-5),
        activation=r.activation("hidden_act", "gelu"),
        gated=False,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=True,
        names=tensor_names(
            "gpt_neox.layers.{i}",
            embed="gpt_neox.embed_in",
            norm="gpt_neox.final_layer_norm",
            lm_head="embed_out",
            qkv=".attention.query_key_value",
            o=".attention.dense",
            up=".mlp.dense_h_to_4h",
            down=".mlp.dense_4h_to_h",
        ),
    )


def gptj(r: ConfigReader, **roles: str) -> DecoderConfig:
    roles = roles or {p: f".attn.{p}_proj" for p in "qkv"}
    return usual_config(
        r,
        **short_keys(r),
        wiring="parallel",
        norm="layer",
        norm_eps=r.number("layer_norm_epsilon", 1e-5),
        activation=r.activation("activation_function", "gelu_new"),
        gated=False,
        mlp_bias=True,
        head_bias=True,
        names=tensor_names(
            "transformer.h.{i}",
            embed="transformer.wte",
            norm="transformer.ln_f",
            attn_norm=".ln_1",
            mlp_norm="",
            o=".attn.out_proj",
            up=".mlp.fc_in",
            down=".mlp.fc_out",
            **roles,
        ),
    )


def codegen(r: ConfigReader) -> DecoderConfig:
    return gptj(r, qkv=".attn.qkv_proj")


def short_keys(r: ConfigReader) -> dict[str, Any]:
    hidden, heads = r.integer("n_embd", 4096), r.integer("n_head", 16)
    turned = r.integer("rotary_dim", 64, maximum=hidden // heads)
    return {
        "hidden_size": hidden,
        "intermediate_size": r.integer("n_inner", 4 * hidden),
        "num_q_heads": heads,
        "num_kv_heads": heads,
        "head_dim": hidden // heads,
        "windows": (None,) * r.layers("n_layer"),
        "max_length": r.integer("n_positions", 2048),
        "rope": {"rope_type": "default", "theta": 10000.0, "partial": turned * heads / hidden},
        "interleaved": True,
    }


def persimmon(r: ConfigReader) -> DecoderConfig:
    return usual_config(
        r,
        max_positions=16384,
        num_kv_heads=r.integer("num_attention_heads"),
        head_dim=r.integer("hidden_size") // r.integer("num_attention_heads"),
        rope=r.rope(default_partial=0.5),
        norm="layer",
        norm_eps=r.number("layer_norm_eps", 1e-5),
        activation=r.activation("hidden_act", "relu2"),
        gated=False,
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
        qk_norm="head" if r.flag("qk_layernorm", True) else "",
        names=tensor_names(
            norm="model.final_layernorm",
            qkv=".self_attn.query_key_value",
            o=".self_attn.dense",
            q_norm=".self_attn.q_layernorm",
            k_norm=".self_attn.k_layernorm",
            up=".mlp.dense_h_to_4h",
            down=".mlp.dense_4h_to_h",
        ),
    )


def split_quarters(cfg: DecoderConfig, fused: Tensor) -> Tensor:
    """CodeGen stores four blocks, each with its queries, values and keys."""
    blocks = fused.reshape(4, 3, -1, *fused.shape[1:])
    return blocks[:, [0, 2, 1]].transpose(0, 1).reshape(fused.shape)


class GptNeox(DecoderArchitecture):
    configs = {
        "GPTNeoXForCausalLM": neox,
        "GPTJForCausalLM": gptj,
        "CodeGenForCausalLM": codegen,
        "PersimmonForCausalLM": persimmon,
    }
    spellings = {
        "n_embd": ("hidden_size",),
        "n_head": ("num_attention_heads",),
        "n_layer": ("num_hidden_layers",),
        "n_positions": ("max_position_embeddings",),
    }
    transforms = {
        "GPTNeoXForCausalLM": {"qkv": split_per_head},
        "PersimmonForCausalLM": {"qkv": split_per_head},
        "CodeGenForCausalLM": {"qkv": split_quarters},
    }
    ignored = (
        "gpt_neox.layers.{i}.attention.bias",
        "gpt_neox.layers.{i}.attention.masked_bias",
        "transformer.h.{i}.attn.bias",
        "transformer.h.{i}.attn.masked_bias",
        "transformer.h.{i}.attn.causal_mask",
    )

"""Llama, Mistral and models built like them, as data. Torch-free."""

from __future__ import annotations

from lmkit.api import UnsupportedModel
from lmkit_decoders import ConfigReader, DecoderArchitecture, DecoderConfig, usual_config

from lmkit_model_llama.defaults import DEFAULTS, GROWING, STRETCHED


def llama(r: ConfigReader) -> DecoderConfig:
    r.one_of("pretraining_tp", (1,), 1)  # other values slice the matmuls
    bias = r.flag("attention_bias", False)
    return usual_config(
        r,
        max_positions=2048,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=r.flag("mlp_bias", False),
    )


def mistral(r: ConfigReader) -> DecoderConfig:
    window = r.optional("sliding_window", 4096)
    return usual_config(r, max_positions=131072, windows=(window,) * r.layers())


def ministral(r: ConfigReader) -> DecoderConfig:
    window = r.optional("sliding_window", 4096)
    return usual_config(r, max_positions=131072, windows=r.windows(lambda i: window is not None, 4096))


def ministral3(r: ConfigReader) -> DecoderConfig:
    rope = r.rope(1e6, extra=("llama_4_scaling_beta", "max_position_embeddings"), missing=GROWING)
    if rope["rope_type"] != "yarn" or "llama_4_scaling_beta" not in rope:
        raise UnsupportedModel("rope_parameters", rope["rope_type"], "yarn with llama_4_scaling_beta")
    return usual_config(
        r,
        rope=rope,
        norm_eps=r.number("rms_norm_eps", 1e-5),
        windows=(r.optional("sliding_window"),) * r.layers(),
        query_growth=(rope["llama_4_scaling_beta"], rope["original_max_position_embeddings"]),
    )


def mistral3(r: ConfigReader) -> DecoderConfig:
    """The text part is one of two models."""
    return ministral3(r) if r.one_of("model_type", ("mistral", "ministral3")) == "ministral3" else mistral(r)


def smollm3(r: ConfigReader) -> DecoderConfig:
    every = r.integer("no_rope_layer_interval", 4)
    turned = r.switches("no_rope_layers", [int((i + 1) % every != 0) for i in range(r.layers())])
    unturned = tuple(i for i, on in enumerate(turned) if not on)
    sliding = r.flag("use_sliding_window", False) and r.optional("sliding_window") is not None
    bias = r.flag("attention_bias", False)
    return usual_config(
        r,
        max_positions=32768,
        rope=r.rope(2e6),
        num_kv_heads=r.integer("num_key_value_heads", 4),
        windows=r.windows(lambda i: sliding and i in unturned) if sliding else (None,) * r.layers(),
        unturned=unturned,
        tie=r.flag("tie_word_embeddings", True),
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=r.flag("mlp_bias", False),
    )


def arcee(r: ConfigReader) -> DecoderConfig:
    bias = r.flag("attention_bias", False)
    return usual_config(
        r,
        max_positions=4096,
        norm_eps=r.number("rms_norm_eps", 1e-5),
        activation=r.activation("hidden_act", "relu2"),
        gated=False,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=r.flag("mlp_bias", False),
    )


def seed_oss(r: ConfigReader) -> DecoderConfig:
    return usual_config(
        r,
        max_positions=524288,
        qkv_bias=r.flag("attention_bias", True),
        o_bias=r.flag("attention_out_bias", False),
        mlp_bias=r.flag("mlp_bias", False),
    )


def cwm(r: ConfigReader) -> DecoderConfig:
    return usual_config(
        r,
        max_positions=131072,
        rope=r.rope(1e6, missing=STRETCHED),
        norm_eps=r.number("rms_norm_eps", 1e-5),
        head_dim=r.integer("head_dim", 128),
        num_kv_heads=r.integer("num_key_value_heads", 8),
        windows=r.windows(lambda i: i % 4 != 0, 8192),
        mlp_bias=r.flag("mlp_bias", False),
    )


def helium(r: ConfigReader) -> DecoderConfig:
    return usual_config(
        r,
        max_positions=4096,
        rope=r.rope(1e5),
        norm_eps=r.number("rms_norm_eps", 1e-8),
        head_dim=r.integer("head_dim", 128),
        interleaved=True,
        qkv_bias=r.flag("attention_bias", False),
        mlp_bias=r.flag("mlp_bias", False),
    )


def jais2(r: ConfigReader) -> DecoderConfig:
    bias = r.flag("attention_bias", True)
    return usual_config(
        r,
        max_positions=8192,
        norm="layer",
        norm_eps=r.number("layer_norm_eps", 1e-5),
        activation=r.activation("hidden_act", "relu2"),
        gated=False,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=r.flag("mlp_bias", True),
    )


def internlm3(r: ConfigReader) -> DecoderConfig:
    bias = r.flag("bias", False)
    return usual_config(
        r,
        max_positions=32768,
        num_kv_heads=r.integer("num_key_value_heads", 2),
        head_dim=r.integer("head_dim", 128),
        qkv_bias=r.flag("qkv_bias", False),
        o_bias=bias,
        mlp_bias=bias,
    )


def iquest_coder(r: ConfigReader) -> DecoderConfig:
    r.one_of("clip_qkv", (None,))
    r.one_of("use_sliding_window", (None, False))
    return llama(r)


def minicpm(r: ConfigReader) -> DecoderConfig:
    r.one_of("num_experts", (None, 0))
    r.one_of("sparse_config", (None,))
    bias = r.flag("attention_bias", False)
    return usual_config(
        r,
        max_positions=2048,
        embed_scale=r.number("scale_emb", 1),
        residual_scale=r.number("scale_depth", 1.0) / r.layers() ** 0.5,
        logit_scale=r.number("dim_model_base", 1) / r.integer("hidden_size"),
        tie=r.flag("tie_word_embeddings", True),
        qkv_bias=bias,
        o_bias=bias,
    )


class Llama(DecoderArchitecture):
    configs = {
        "LlamaForCausalLM": llama,
        "MistralForCausalLM": mistral,
        "MinistralForCausalLM": ministral,
        "Ministral3ForCausalLM": ministral3,
        "Mistral3ForConditionalGeneration": mistral3,
        "SmolLM3ForCausalLM": smollm3,
        "ArceeForCausalLM": arcee,
        "SeedOssForCausalLM": seed_oss,
        "CwmForCausalLM": cwm,
        "HeliumForCausalLM": helium,
        "Jais2ForCausalLM": jais2,
        "InternLM3ForCausalLM": internlm3,
        "IQuestCoderForCausalLM": iquest_coder,
        "MiniCPMForCausalLM": minicpm,
        "LLaMAForCausalLM": llama,  # its name in the oldest files
    }
    defaults = DEFAULTS

"""OLMo as data: 1 (norms without weights), 2 and 3 (norms after blocks, and over all heads), and the hybrid of gated
delta nets and attention. Torch-free."""

from __future__ import annotations

from typing import Any

from lmkit_decoders import (
    DELTA,
    EXPERTS,
    ConfigReader,
    DecoderArchitecture,
    DecoderConfig,
    MoEConfig,
    delta_mixer,
    tensor_names,
    usual_config,
)


def after(**roles: str) -> dict[str, str]:
    post = {"attn_post_norm": ".post_attention_layernorm", "mlp_post_norm": ".post_feedforward_layernorm"}
    return tensor_names(attn_norm="", mlp_norm="", **post, **roles)


def olmo(r: ConfigReader) -> DecoderConfig:
    bias = r.flag("attention_bias", False)
    return usual_config(
        r,
        max_positions=2048,
        norm="layer_plain",
        norm_eps=1e-5,
        qkv_clip=r.limit("clip_qkv"),
        qkv_bias=bias,
        o_bias=bias,
    )


def olmo2(r: ConfigReader, **more: Any) -> DecoderConfig:
    bias = r.flag("attention_bias", False)
    given = {"max_positions": 2048, "norm_eps": r.number("rms_norm_eps", 1e-5), "names": after(), **more}
    return usual_config(
        r,
        wiring="post",
        qk_norm="whole",
        qkv_bias=bias,
        o_bias=bias,
        **given,
    )


def olmo3(r: ConfigReader) -> DecoderConfig:
    """Scaled rotary positions, where there are any, are those of the full layers."""
    full = r.rope(500000.0, kind_of_layer="full_attention")
    local = {"rope_type": "default", "theta": full["theta"], "partial": 1.0}
    if r.per_layer_kind("rope_parameters"):
        local = r.rope(500000.0, kind_of_layer="sliding_attention")
    return olmo2(r, rope=full, window_rope=local, windows=r.windows(lambda i: (i + 1) % 4 != 0, 4096))


def olmoe(r: ConfigReader) -> DecoderConfig:
    bias = r.flag("attention_bias", False)
    return usual_config(
        r,
        max_positions=4096,
        norm_eps=r.number("rms_norm_eps", 1e-5),
        qk_norm="whole",
        qkv_clip=r.limit("clip_qkv"),
        qkv_bias=bias,
        o_bias=bias,
        moe=experts(r, 64, 8),
        names=tensor_names(**EXPERTS),
    )


def flex_olmo(r: ConfigReader) -> DecoderConfig:
    return olmo2(
        r,
        max_positions=4096,
        rope=r.rope(500000.0),
        norm_eps=r.number("rms_norm_eps", 1e-6),
        moe=experts(r, 7, 5),
        names=after(**EXPERTS),
    )


def experts(r: ConfigReader, num: int, top_k: int) -> MoEConfig:
    return MoEConfig(
        num_experts=r.integer("num_experts", num),
        top_k=r.integer("num_experts_per_tok", top_k),
        size=r.integer("intermediate_size"),
        layers=(True,) * r.layers(),
        renormalize=r.flag("norm_topk_prob", False),
    )


def olmo_hybrid(r: ConfigReader) -> DecoderConfig:
    """Gated delta nets after norms, and attention before them; files name the norm between two blocks in two ways."""
    r.activation(known=("silu",))  # of the delta nets' convolutions, too
    linear, full, rope = "linear_attention", "full_attention", r.config.get("rope_parameters")
    last = r.layers() - 1
    kinds = r.layer_kinds(lambda i: full if i % 4 == 3 or i == last < 3 else linear, (linear, full))
    heads = r.integer("num_attention_heads")
    k_heads, v_heads = r.integer("linear_num_key_heads", heads), r.integer("linear_num_value_heads", heads)
    k_dim = r.integer("linear_key_head_dim", 3 * r.integer("hidden_size") // (4 * k_heads))
    mixer = delta_mixer(
        r,
        layers=tuple(kind == linear for kind in kinds),
        k_heads=k_heads,
        v_heads=v_heads,
        k_dim=k_dim,
        v_dim=r.integer("linear_value_head_dim", 2 * k_dim),
        eps=1e-5,
        beta=2.0 if r.flag("linear_allow_neg_eigval", True) else 1.0,
    )
    parts = {"q": "q", "k": "k", "v": "v", "z": "g", "b": "b", "a": "a", "o": "o"}
    names = tensor_names(
        attn_norm=".input_layernorm",
        attn_norm_2=".attention_layer_norm",
        mlp_norm=".post_attention_layernorm",
        mlp_norm_2=".feedforward_layer_norm",
        mlp_post_norm=".post_feedforward_layernorm",
        delta=".linear_attn",
        delta_scale=".linear_attn.o_norm",
        **{f"delta_{part}": f".linear_attn.{name}_proj" for part, name in parts.items()},
        **{f"delta_conv_{part}": f".linear_attn.{part}_conv1d" for part in "qkv"},
    )
    theta = r.config.get("rope_theta", 1.0)
    turned = (rope.get("rope_theta", theta) if isinstance(rope, dict) else theta) is not None
    return olmo2(
        r,
        max_positions=65536,
        norm_eps=r.number("rms_norm_eps", 1e-6),
        rope=r.rope() if turned else None,
        mixer=mixer,
        names=names,
    )


class Olmo(DecoderArchitecture):
    configs = {
        "OlmoForCausalLM": olmo,
        "Olmo2ForCausalLM": olmo2,
        "Olmo3ForCausalLM": olmo3,
        "OlmoeForCausalLM": olmoe,
        "FlexOlmoForCausalLM": flex_olmo,
        "OlmoHybridForCausalLM": olmo_hybrid,
    }
    models = {"OlmoHybridForCausalLM": "lmkit_model_olmo.model:OlmoHybrid"}
    spellings = {
        "num_experts": ("num_local_experts",),
    }
    targets = {**DELTA, "attn_norm_2": "layers.{i}.attn_norm", "mlp_norm_2": "layers.{i}.mlp_norm"}

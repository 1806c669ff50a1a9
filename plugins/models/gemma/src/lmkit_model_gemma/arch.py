"""Gemma 1 to 3 (text), VaultGemma and RecurrentGemma as data. Torch-free.

All keep norm weights as a difference from 1 and scale embeddings by the square root of their size. From the second one
on, blocks have norms on both sides, logits are capped, and windowed layers alternate with full ones. RecurrentGemma
is a Griffin (https://arxiv.org/abs/2402.19427): two of three layers have a recurrent unit instead of attention.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, replace
from typing import Any

from lmkit.api import AttnNeed, LinearSpec, StateTensor, UnsupportedModel
from lmkit_decoders import ConfigReader, DecoderArchitecture, DecoderConfig, MixerConfig, tensor_names, usual_config

NORMS = {
    "attn_post_norm": ".post_attention_layernorm",
    "mlp_norm": ".pre_feedforward_layernorm",
    "mlp_post_norm": ".post_feedforward_layernorm",
}
SANDWICH = tensor_names(**NORMS)
TANH_GELU = "gelu_pytorch_tanh"


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmaConfig(DecoderConfig):
    attn_softcap: float | None = None  # of the scores of attention

    def need(self, layer: int) -> AttnNeed:
        return replace(super(GemmaConfig, self).need(layer), softcap=self.attn_softcap)


def gemma(r: ConfigReader) -> DecoderConfig:
    return usual_config(
        r,
        max_positions=8192,
        activation=r.activation("hidden_act", TANH_GELU),
        **common(r),
        num_kv_heads=r.integer("num_key_value_heads", 16),
    )


def gemma2(r: ConfigReader) -> DecoderConfig:
    return usual_config(r, max_positions=8192, wiring="sandwich", names=SANDWICH, **alternating(r), **common(r))


def vault_gemma(r: ConfigReader) -> DecoderConfig:
    names = tensor_names(mlp_norm=".pre_feedforward_layernorm")
    return usual_config(r, max_positions=8192, names=names, **alternating(r), **common(r))


def gemma3(r: ConfigReader) -> DecoderConfig:
    pattern = r.integer("sliding_window_pattern", r.integer("_sliding_window_pattern", 6))
    return usual_config(
        r,
        max_positions=131072,
        wiring="sandwich",
        names=SANDWICH,
        qk_norm="head",
        rope=r.rope(1e6, kind_of_layer="full_attention"),
        window_rope=local_rope(r),
        **alternating(r, pattern, softcap=None) | {"attn_softcap": None},  # the key is there, and has no effect
        **common(r),
    )


def local_rope(r: ConfigReader) -> dict[str, Any]:
    """Rotary parameters of layers with a window."""
    if r.per_layer_kind("rope_parameters"):
        return r.rope(10000.0, kind_of_layer="sliding_attention")
    return {"rope_type": "default", "theta": r.number("rope_local_base_freq", 10000.0), "partial": 1.0}


def common(r: ConfigReader) -> dict[str, Any]:
    r.one_of("use_bidirectional_attention", (None, False, "vision"))  # vision: what is no text sees what follows
    bias = r.flag("attention_bias", False)
    return {
        "norm": "rms_offset",
        "embed_scale": r.integer("hidden_size") ** 0.5,
        "head_dim": r.integer("head_dim", 256),
        "tie": r.flag("tie_word_embeddings", True),
        "qkv_bias": bias,
        "o_bias": bias,
    }


def alternating(r: ConfigReader, pattern: int = 2, softcap: float | None = 50.0) -> dict[str, Any]:
    return {
        "windows": r.windows(lambda i: (i + 1) % pattern != 0, 4096),
        "num_kv_heads": r.integer("num_key_value_heads", 4),
        "activation": r.activation("hidden_activation", TANH_GELU),
        "attn_scale": r.number("query_pre_attn_scalar", 256) ** -0.5,
        "kind": GemmaConfig,
        "attn_softcap": r.limit("attn_logit_softcapping", softcap),
        "logit_softcap": r.limit("final_logit_softcapping", softcap and 30.0),
    }


GRIFFIN = tensor_names(
    norm="model.final_norm",
    attn_norm=".temporal_pre_norm",
    mlp_norm=".channel_pre_norm",
    **{p: f".temporal_block.{p}_proj" for p in "qkvo"},
    **{p: f".mlp_block.{p}_proj" for p in ("gate", "up", "down")},
    griffin_x=".temporal_block.linear_x",
    griffin_y=".temporal_block.linear_y",
    griffin_o=".temporal_block.linear_out",
    griffin_conv=".temporal_block.conv_1d",
    griffin=".temporal_block.rg_lru",
)


def recurrent_gemma(r: ConfigReader) -> DecoderConfig:
    kinds = r.config.get("block_types") or ["recurrent", "recurrent", "attention"]
    if not isinstance(kinds, list) or any(kind not in ("recurrent", "attention") for kind in kinds):
        raise UnsupportedModel("block_types", kinds, "a list of recurrent, attention")
    d, heads, num = r.integer("hidden_size"), r.integer("num_attention_heads"), r.layers()
    width, taps = r.integer("lru_width", d), r.integer("conv1d_width", 4)
    mixer = MixerConfig(
        layers=tuple(kinds[i % len(kinds)] == "recurrent" for i in range(num)),
        state=(StateTensor("conv", (taps - 1, width)), StateTensor("lru", (width,))),
        linears=(
            LinearSpec("xy", d, (width, width), True, "none", ("x", "y"), ("griffin_x", "griffin_y")),
            LinearSpec("o", width, (d,), True, "none", (), ("griffin_o",)),
        ),
        num_parameters=width * (taps + 1) + 2 * width * (width // heads + 1) + width,
        options={"width": width, "taps": taps},
    )
    window = r.integer("attention_window_size", 2048)
    return usual_config(
        r,
        max_positions=8192,
        intermediate_size=r.integer("intermediate_size") // 2,
        activation=r.activation("hidden_activation", TANH_GELU),
        rope=r.rope(default_partial=0.5),
        windows=(window,) * num,
        logit_softcap=r.limit("logits_soft_cap", 30.0),
        mlp_bias=True,
        mixer=mixer,
        names=GRIFFIN,
        **common(r) | {"embed_scale": bfloat16(d**0.5), "head_dim": d // heads, "o_bias": True},
    )


def bfloat16(x: float) -> float:
    """`x` rounded to bfloat16: the precision in which this family keeps its scale."""
    bits = int.from_bytes(struct.pack(">f", x), "big")
    bits += 0x7FFF + (bits >> 16 & 1)
    return float(struct.unpack(">f", (bits & 0xFFFF0000).to_bytes(4, "big"))[0])


class Gemma(DecoderArchitecture):
    configs = {
        "GemmaForCausalLM": gemma,
        "Gemma2ForCausalLM": gemma2,
        "Gemma3ForCausalLM": gemma3,
        "Gemma3ForConditionalGeneration": gemma3,
        "VaultGemmaForCausalLM": vault_gemma,
        "RecurrentGemmaForCausalLM": recurrent_gemma,
    }
    config = GemmaConfig
    models = {"RecurrentGemmaForCausalLM": "lmkit_model_gemma.model:RecurrentGemma"}
    spellings = {"attention_window_size": ("sliding_window",)}
    targets = {
        "griffin_x": ("layers.{i}.attn.xy", "x"),
        "griffin_y": ("layers.{i}.attn.xy", "y"),
        "griffin_o": "layers.{i}.attn.o",
        "griffin_conv": "layers.{i}.attn.conv",
        "griffin": "layers.{i}.attn",
    }

"""Qwen2 and Qwen3 as data, dense and with experts, and MiMo, which is a Qwen2. Torch-free."""

from __future__ import annotations

from collections.abc import Callable

from lmkit_decoders import (
    DELTA,
    EXPERTS,
    ConfigReader,
    DecoderArchitecture,
    DecoderConfig,
    FurtherLayer,
    OneTensor,
    tensor_names,
    usual_config,
)

from lmkit_model_qwen.hybrid import grouped_ba, grouped_qkvz, qwen3_5, qwen3_5_moe, qwen3_next
from lmkit_model_qwen.mixture import SHARED, experts

HYBRID = (
    "Qwen3NextForCausalLM",
    "Qwen3_5ForCausalLM",
    "Qwen3_5MoeForCausalLM",
    "Qwen3_5ForConditionalGeneration",
    "Qwen3_5MoeForConditionalGeneration",
)


def qwen2(r: ConfigReader) -> DecoderConfig:
    return usual_config(r, max_positions=32768, windows=windows(r), qkv_bias=True)


def qwen3(r: ConfigReader) -> DecoderConfig:
    bias = r.flag("attention_bias", False)
    return usual_config(
        r,
        max_positions=32768,
        windows=windows(r),
        head_dim=r.integer("head_dim", 128),
        qk_norm="head",
        qkv_bias=bias,
        o_bias=bias,
    )


def windows(
    r: ConfigReader, slides: Callable[[int, int], bool] = lambda i, first: i >= first
) -> tuple[int | None, ...]:
    """Sliding window of each layer: `layer_types` where given, else layers from `max_window_layers` on.

    `slides`(layer, max_window_layers) is another choice of layers.
    """
    sliding = r.flag("use_sliding_window", False) and r.optional("sliding_window", 4096) is not None
    first = r.count("max_window_layers", 28)
    if not sliding:  # a size without use is none
        r = ConfigReader({**r.config, "sliding_window": None})
    return r.windows(lambda i: sliding and slides(i, first), 4096 if sliding else None)


def qwen2_moe(r: ConfigReader) -> DecoderConfig:
    moe = experts(
        r,
        num_experts=r.integer("num_experts", 60),
        top_k=r.integer("num_experts_per_tok", 4),
        size=r.integer("moe_intermediate_size", 1408),
        shared_size=r.integer("shared_expert_intermediate_size", 5632),
    )
    bias = r.flag("qkv_bias", True)
    return usual_config(
        r,
        max_positions=32768,
        windows=windows(r, lambda i, first: i % 2 == 0 and i < first),
        intermediate_size=r.integer("intermediate_size", 5632),
        num_kv_heads=r.integer("num_key_value_heads", 16),
        qkv_bias=bias,
        moe=moe,
        names=tensor_names(**SHARED),
    )


def qwen3_moe(r: ConfigReader) -> DecoderConfig:
    bias = r.flag("attention_bias", False)
    size = r.optional("sliding_window", 4096) if r.flag("use_sliding_window", False) else None
    moe = experts(
        r,
        num_experts=r.integer("num_experts", 128),
        top_k=r.integer("num_experts_per_tok", 8),
        size=r.integer("moe_intermediate_size", 768),
    )
    return usual_config(
        r,
        max_positions=32768,
        windows=(size,) * r.layers(),
        intermediate_size=r.integer("intermediate_size", 6144),
        num_kv_heads=r.integer("num_key_value_heads", 4),
        qk_norm="head",
        qkv_bias=bias,
        o_bias=bias,
        moe=moe,
        names=tensor_names(**EXPERTS),
    )


class Qwen(DecoderArchitecture):
    configs = {
        "Qwen2ForCausalLM": qwen2,
        "Qwen3ForCausalLM": qwen3,
        "Qwen2MoeForCausalLM": qwen2_moe,
        "Qwen3MoeForCausalLM": qwen3_moe,
        "Qwen3NextForCausalLM": qwen3_next,
        "Qwen3_5ForCausalLM": qwen3_5,
        "Qwen3_5MoeForCausalLM": qwen3_5_moe,
        "MiMoForCausalLM": qwen2,
        "Qwen2VLForConditionalGeneration": qwen2,
        "Qwen2_5_VLForConditionalGeneration": qwen2,
        "Qwen3VLForConditionalGeneration": qwen3,
        "Qwen3_5ForConditionalGeneration": qwen3_5,
        "Qwen3_5MoeForConditionalGeneration": qwen3_5_moe,
    }
    models = {
        **dict.fromkeys(HYBRID, "lmkit_model_qwen.model:Hybrid"),
        "Qwen2MoeForCausalLM": "lmkit_model_qwen.model:Qwen2Moe",
    }
    transforms = {"Qwen3NextForCausalLM": {"delta_qkvz": grouped_qkvz, "delta_ba": grouped_ba}}
    defaults = {
        **{key: {"num_key_value_heads": 32} for key in ("Qwen2ForCausalLM", "Qwen3ForCausalLM", "MiMoForCausalLM")},
        **{key: {"num_key_value_heads": 2} for key in (name for name in HYBRID if "Moe" in name or "Next" in name)},
    }
    spellings = {
        "num_experts": ("num_local_experts",),
    }
    targets = {**DELTA, "shared_weight": OneTensor("layers.{i}.mlp.shared_gate")}

    def extra_parameters(self, name: str, cfg: DecoderConfig) -> int:
        """The gates of shared experts."""
        return cfg.hidden_size * sum(cfg.moe.layers) if cfg.moe is not None and cfg.moe.shared_size else 0

    drafts = {
        "MiMoMTP": FurtherLayer(
            "MiMoForCausalLM",
            layer="model.mtp_layers.0",
            names={
                "enorm": ".token_layernorm", "hnorm": ".hidden_layernorm", "fc": ".input_proj",
                "norm": ".final_layernorm",
            },
            hidden_first=True,
        )
    }  # fmt: skip
    ignored = ("model.mtp_layers.{any}", "mtp.{any}")

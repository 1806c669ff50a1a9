"""Qwen2 and Qwen3 as data, dense and with experts, and MiMo, which is a Qwen2. Torch-free."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lmkit.api import UnsupportedModel
from lmkit.layers import (
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

if TYPE_CHECKING:
    from torch import Tensor

SHARED = {
    **EXPERTS,
    **{f"shared_{p}": f".mlp.shared_expert.{p}_proj" for p in ("gate", "up", "down")},
    "shared_weight": ".mlp.shared_expert_gate.weight",
}
DELTA_NAMES = {
    "delta_o": ".linear_attn.out_proj",
    "delta_scale": ".linear_attn.norm",
    "delta_conv": ".linear_attn.conv1d",
    "delta": ".linear_attn",
}


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


def windows(r: ConfigReader) -> tuple[int | None, ...]:
    """Sliding window of each layer: `layer_types` where given, else layers from `max_window_layers` on."""
    sliding = r.flag("use_sliding_window", False) and r.optional("sliding_window", 4096) is not None
    first = r.count("max_window_layers", 28)
    if not sliding:  # a size without use is none
        r = ConfigReader({**r.config, "sliding_window": None})
    return r.windows(lambda i: sliding and i >= first, 4096 if sliding else None)


def qwen2_moe(r: ConfigReader) -> DecoderConfig:
    moe = experts(
        r,
        num_experts=r.integer("num_experts", 60),
        top_k=r.integer("num_experts_per_tok", 4),
        size=r.integer("moe_intermediate_size", 1408),
        shared_size=r.integer("shared_expert_intermediate_size", 5632),
        shared_gate=True,
    )
    bias = r.flag("qkv_bias", True)
    return usual_config(
        r,
        max_positions=32768,
        windows=windows(r),
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
        num_experts=r.integer("num_experts", r.integer("num_local_experts", 128)),
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


def qwen3_next(r: ConfigReader) -> DecoderConfig:
    moe = experts(
        r,
        num_experts=r.integer("num_experts", 512),
        top_k=r.integer("num_experts_per_tok", 10),
        size=r.integer("moe_intermediate_size", 512),
        renormalize=r.flag("norm_topk_prob", True),
        **shared_expert(r),
    )
    names = {"delta_qkvz": ".linear_attn.in_proj_qkvz", "delta_ba": ".linear_attn.in_proj_ba"}
    return hybrid(r, ("qkv", "z"), moe=moe, names=tensor_names(**{**SHARED, **DELTA_NAMES, **names}))


def qwen3_5(r: ConfigReader, **more: Any) -> DecoderConfig:
    """Its positions have three axes, which are one for text."""
    rope = r.config.get("rope_parameters")
    if isinstance(rope, dict):
        rope = {key: value for key, value in rope.items() if not key.startswith("mrope_")}
        r = ConfigReader({**r.config, "rope_parameters": rope})
    names = {f"delta_{part}": f".linear_attn.in_proj_{part}" for part in ("qkv", "z", "b", "a")}
    return hybrid(r, ("qkv", "z"), **{"names": tensor_names(**DELTA_NAMES, **names), **more})


def qwen3_5_moe(r: ConfigReader) -> DecoderConfig:
    names = {f"delta_{part}": f".linear_attn.in_proj_{part}" for part in ("qkv", "z", "b", "a")}
    moe = MoEConfig(
        num_experts=r.integer("num_experts", 256),
        top_k=r.integer("num_experts_per_tok", 8),
        size=r.integer("moe_intermediate_size", 512),
        layers=(True,) * r.layers(),
        **shared_expert(r),
    )
    return qwen3_5(r, moe=moe, intermediate_size=moe.size, names=tensor_names(**{**SHARED, **DELTA_NAMES, **names}))


def shared_expert(r: ConfigReader) -> dict[str, Any]:
    return {"shared_size": r.integer("shared_expert_intermediate_size", 512), "shared_gate": True}


def hybrid(r: ConfigReader, parts: tuple[str, ...], **given: Any) -> DecoderConfig:
    """Gated delta nets, and every fourth layer attention with a gate on its output."""
    every = r.integer("full_attention_interval", 4)
    full, linear = "full_attention", "linear_attention"
    kinds = r.layer_kinds(lambda i: linear if (i + 1) % every else full, (full, linear))
    eps, bias = r.number("rms_norm_eps", 1e-6), r.flag("attention_bias", False)
    mixer = delta_mixer(
        r,
        layers=tuple(kind == linear for kind in kinds),
        k_heads=r.integer("linear_num_key_heads", 16),
        v_heads=r.integer("linear_num_value_heads", 32),
        k_dim=r.integer("linear_key_head_dim", 128),
        v_dim=r.integer("linear_value_head_dim", 128),
        eps=eps,
        parts=parts,
    )
    r.one_of("hidden_act", ("silu",), "silu")
    return usual_config(
        r,
        max_positions=32768,
        rope=r.rope(default_partial=0.25),
        norm="rms_offset",
        norm_eps=eps,
        head_dim=r.integer("head_dim", 256),
        qk_norm="head",
        query_gate=True,
        qkv_bias=bias,
        o_bias=bias,
        mixer=mixer,
        **given,
    )


def grouped_qkvz(cfg: DecoderConfig, weight: Tensor) -> Tensor:
    """For each head of keys its query, key, values, gates -> all queries, all keys, all values, all gates."""
    assert cfg.mixer is not None
    given = cfg.mixer.options
    v = given["v_heads"] // given["k_heads"] * given["v_dim"]
    heads = weight.unflatten(0, (given["k_heads"], -1))
    return cat_parts(heads.split((given["k_dim"], given["k_dim"], v, v), dim=1))


def grouped_ba(cfg: DecoderConfig, weight: Tensor) -> Tensor:
    """The same for the shares that are written and the decays."""
    assert cfg.mixer is not None
    return cat_parts(weight.unflatten(0, (cfg.mixer.options["k_heads"], -1)).chunk(2, dim=1))


def cat_parts(parts: tuple[Tensor, ...]) -> Tensor:
    """Of [heads, n, in] each -> [heads * n + ..., in]."""
    import torch

    return torch.cat([part.flatten(0, 1) for part in parts])


def experts(r: ConfigReader, **given: Any) -> MoEConfig:
    """Experts in every `decoder_sparse_step`-th layer, but not in `mlp_only_layers`."""
    step, without = r.integer("decoder_sparse_step", 1), r.config.get("mlp_only_layers") or []
    if not isinstance(without, list):
        raise UnsupportedModel("mlp_only_layers", without, "a list of layers")
    return MoEConfig(
        layers=tuple(i not in without and (i + 1) % step == 0 for i in range(r.layers())),
        **{"renormalize": r.flag("norm_topk_prob", False), **given},
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
    }
    models = dict.fromkeys(
        ("Qwen3NextForCausalLM", "Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM"), "lmkit_model_qwen.model:Hybrid"
    )
    transforms = {"Qwen3NextForCausalLM": {"delta_qkvz": grouped_qkvz, "delta_ba": grouped_ba}}
    targets = DELTA
    ignored = ("model.mtp_layers.{any}", "mtp.{any}")

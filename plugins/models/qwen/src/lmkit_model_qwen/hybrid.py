"""Qwen3-Next and Qwen3.5 as data: gated delta nets in most layers. Torch-free."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lmkit_decoders import ConfigReader, DecoderConfig, MoEConfig, delta_mixer, tensor_names, usual_config

from lmkit_model_qwen.mixture import SHARED, experts, shared_expert

if TYPE_CHECKING:
    from torch import Tensor

DELTA_NAMES = {
    "delta_o": ".linear_attn.out_proj",
    "delta_scale": ".linear_attn.norm",
    "delta_conv": ".linear_attn.conv1d",
    "delta": ".linear_attn",
}


class HybridConfig(DecoderConfig):
    """The projection of queries brings a gate for each head."""

    def head_sizes(self) -> dict[str, int]:
        sizes = super().head_sizes()
        return {**sizes, "q": 2 * sizes["q"]}


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
    r.activation(known=("silu",))
    return usual_config(
        r,
        max_positions=32768,
        rope=r.rope(default_partial=0.25),
        norm="rms_offset",
        norm_eps=eps,
        head_dim=r.integer("head_dim", 256),
        qk_norm="head",
        kind=HybridConfig,
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
    """Joins parts of [heads, n, in] each -> [heads * n + ..., in]."""
    import torch

    return torch.cat([part.flatten(0, 1) for part in parts])

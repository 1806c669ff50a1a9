"""ERNIE 4.5 as data: a Llama that turns neighbouring pairs. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from lmkit_decoders import (
    EXPERTS,
    ConfigReader,
    DecoderArchitecture,
    DecoderConfig,
    MoEConfig,
    tensor_names,
    usual_config,
)

if TYPE_CHECKING:
    from torch import Tensor


NEGLIGIBLE = 1e-9  # no sum of chosen probabilities is as small


def ernie(r: ConfigReader, **more: Any) -> DecoderConfig:
    bias = r.flag("use_bias", False)
    return usual_config(
        r,
        max_positions=131072,
        rope=r.rope(500000.0),
        interleaved=True,
        norm_eps=r.number("rms_norm_eps", 1e-5),
        tie=r.flag("tie_word_embeddings", True),
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=bias,
        **more,
    )


def ernie_moe(r: ConfigReader) -> DecoderConfig:
    first, last = r.count("moe_layer_start_index", 1), r.config.get("moe_layer_end_index", -1)
    end = r.layers() if last == -1 else r.count("moe_layer_end_index") + 1
    every = r.integer("moe_layer_interval", 1)
    size = r.integer("moe_intermediate_size", 1536)
    moe = MoEConfig(
        num_experts=r.integer("moe_num_experts", 64),
        top_k=r.integer("moe_k", 6),
        size=size,
        layers=tuple((i + 1) % every == 0 and first <= i < end for i in range(r.layers())),
        correction=True,
        float32=True,
        renormalize=limits(r)["norm_min"] <= NEGLIGIBLE,  # else its router does
        shared_size=size * r.count("moe_num_shared_experts", 2),
    )
    names = tensor_names(**{**EXPERTS, "correction": ".mlp.moe_statics.e_score_correction_bias"})
    return ernie(r, moe=moe, head_bias=r.flag("use_bias", False), names=names)


def limits(r: ConfigReader) -> Mapping[str, Any]:
    return {"norm_min": r.number("moe_norm_min", 1e-12)}


def flat(cfg: DecoderConfig, correction: Tensor) -> Tensor:
    """[1, E] -> [E]."""
    return correction.flatten()


class Ernie(DecoderArchitecture):
    configs = {"Ernie4_5ForCausalLM": ernie, "Ernie4_5_MoeForCausalLM": ernie_moe}
    defaults = {
        "Ernie4_5ForCausalLM": {"num_key_value_heads": 2, "head_dim": 128},
        "Ernie4_5_MoeForCausalLM": {"num_key_value_heads": 4},
    }
    spellings = {
        "moe_num_experts": ("num_experts",),
        "moe_k": ("num_experts_per_tok",),
    }
    models = {"Ernie4_5_MoeForCausalLM": "lmkit_model_ernie.model:ErnieMoE"}
    options = {"Ernie4_5_MoeForCausalLM": limits}
    transforms = {"Ernie4_5_MoeForCausalLM": {"correction": flat}}

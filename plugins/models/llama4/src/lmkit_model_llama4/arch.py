"""Llama 4 (text) as data: chunked layers with positions, full ones without, experts beside a shared one. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from lmkit.api import AttnNeed, ModelInfo
from lmkit_decoders import (
    EACH_EXPERT,
    ConfigReader,
    DecoderArchitecture,
    DecoderConfig,
    MoEConfig,
    each_expert,
    tensor_names,
    usual_config,
)

if TYPE_CHECKING:
    from torch import Tensor

NAMES = ("Llama4ForCausalLM", "Llama4ForConditionalGeneration")
FFN = ".feed_forward"


class Llama4Config(DecoderConfig):
    """Windows are chunks: a token sees those of its own chunk only."""

    def need(self, layer: int) -> AttnNeed:
        return replace(super().need(layer), chunked=self.windows[layer] is not None)


def llama4(r: ConfigReader) -> DecoderConfig:
    r.one_of("num_experts_per_tok", (1,), 1)  # a token enters its expert scaled by its score
    num, every = r.layers(), r.integer("no_rope_layer_interval", 4)
    turned = r.switches("no_rope_layers", [int((i + 1) % every != 0) for i in range(num)])
    kinds = r.layer_kinds(
        lambda i: "chunked_attention" if turned[i] else "full_attention", ("chunked_attention", "full_attention")
    )
    chunk = r.integer("attention_chunk_size", 8192)
    bias = r.flag("attention_bias", False)
    return usual_config(
        r,
        kind=Llama4Config,
        max_positions=131072,
        rope=r.rope(500000.0),
        intermediate_size=r.integer("intermediate_size_mlp", 16384),
        num_kv_heads=r.integer("num_key_value_heads", 8),
        head_dim=r.integer("head_dim", 128),
        norm_eps=r.number("rms_norm_eps", 1e-5),
        windows=tuple(chunk if kind == "chunked_attention" else None for kind in kinds),
        unturned=tuple(i for i, on in enumerate(turned) if not on),
        interleaved=True,
        qkv_bias=bias,
        o_bias=bias,
        moe=experts(r),
        names=tensor_names(
            router=f"{FFN}.router",
            **each_expert(FFN),
            experts_up=f"{FFN}.experts.gate_up_proj",
            experts_down=f"{FFN}.experts.down_proj",
            **{p: f"{FFN}.{p}_proj" for p in ("gate", "up", "down")},
            **{f"shared_{p}": f"{FFN}.shared_expert.{p}_proj" for p in ("gate", "up", "down")},
        ),
    )


def experts(r: ConfigReader) -> MoEConfig:
    num, every = r.layers(), r.integer("interleave_moe_layer_step", 1)
    layers = r.layer_numbers("moe_layers", range(every - 1, num, every))
    size = r.integer("intermediate_size", 8192)
    return MoEConfig(
        num_experts=r.integer("num_local_experts", 16),
        top_k=1,
        size=size,
        layers=tuple(i in layers for i in range(num)),
        scoring="sigmoid",
        renormalize=False,
        shared_size=size,
    )


def heads(r: ConfigReader) -> dict[str, Any]:
    """What attention does beside the usual: norms of turned heads, and queries of unturned ones scaled by position."""
    tuned = r.flag("attn_temperature_tuning", True)
    return {
        "normed": r.flag("use_qk_norm", True),
        "scale": r.number("attn_scale", 0.1) if tuned else 0.0,
        "floor": r.number("floor_scale", 8192),
    }


def transposed_experts(cfg: DecoderConfig, weight: Tensor) -> Tensor:
    """[E, in, out] -> [E * out, in]."""
    return weight.transpose(1, 2).flatten(0, 1)


class Llama4(DecoderArchitecture):
    configs = dict.fromkeys(NAMES, llama4)
    config = Llama4Config
    models = dict.fromkeys(NAMES, "lmkit_model_llama4.model:Llama4")
    transforms = {name: {"experts_up": transposed_experts, "experts_down": transposed_experts} for name in NAMES}
    options = dict.fromkeys(NAMES, heads)
    targets = EACH_EXPERT

    def describe(self, config: Mapping[str, object]) -> ModelInfo:
        """The class of the experts in transformers does not say that they are stored [experts, in, out]."""
        return replace(super().describe(config), turned_experts=True)

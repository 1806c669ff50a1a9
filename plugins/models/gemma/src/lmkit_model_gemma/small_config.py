"""How Gemma 3n and 4 (text) are read. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Any, cast

from lmkit.api import LayerInfo, UnsupportedModel
from lmkit_decoders import ConfigReader, DecoderConfig, MoEConfig, tensor_names, usual_config

from lmkit_model_gemma.arch import NORMS, TANH_GELU, common, local_rope

PER_LAYER = {
    "per_layer_embed": "model.embed_tokens_per_layer",
    "per_layer_projection": "model.per_layer_model_projection",
    "per_layer_embed_norm": "model.per_layer_projection_norm",
    "per_layer_gate": ".per_layer_input_gate",
    "per_layer_out": ".per_layer_projection",
    "per_layer_norm": ".post_per_layer_input_norm",
}
ALTUP = {
    "altup_in": "model.altup_projections.{n}",
    "altup_out": "model.altup_unembed_projections.{n}",
    "altup_router_norm": ".altup.router_norm",
    "altup_router": ".altup.modality_router",
    "altup_prediction": ".altup.prediction_coefs",
    "altup_correction": ".altup.correction_coefs",
    "altup": ".altup",
    "laurel_left": ".laurel.linear_left",
    "laurel_right": ".laurel.linear_right",
    "laurel_norm": ".laurel.post_laurel_norm",
}
MIXTURE = {
    **dict.fromkeys(("gate", "up", "down"), ""),
    **{f"shared_{p}": f".mlp.{p}_proj" for p in ("gate", "up", "down")},
    "experts_up": ".experts.gate_up_proj",
    "experts_down": ".experts.down_proj",
    "router": ".router.proj",
    "router_scales": ".router",
    "shared_post_norm": ".post_feedforward_layernorm_1",
    "experts_post_norm": ".post_feedforward_layernorm_2",
    "experts_norm": ".pre_feedforward_layernorm_2",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SmallGemmaConfig(DecoderConfig):
    kv_of: int | None = None  # an earlier layer whose keys and values attention reads: it has none of its own
    k_is_v: bool = False  # no projection of values: they are the keys before norm and rotation

    def layer_info(self, i: int) -> LayerInfo:
        return replace(super(SmallGemmaConfig, self).layer_info(i), kv_of=self.at(i).kv_of)

    def at(self, layer: int) -> SmallGemmaConfig:
        return cast("SmallGemmaConfig", super(SmallGemmaConfig, self).at(layer))

    def head_sizes(self) -> dict[str, int]:
        parts = "q" if self.kv_of is not None else "qk" if self.k_is_v else "qkv"
        sizes = super(SmallGemmaConfig, self).head_sizes()
        return {part: sizes[part] for part in parts}

    def attention_norms(self) -> list[int]:
        norms = super(SmallGemmaConfig, self).attention_norms()
        return norms if self.kv_of is None else norms[:1]


def gemma3n(r: ConfigReader) -> DecoderConfig:
    num, sizes = r.layers(), r.config.get("intermediate_size", 16384)
    sizes = sizes if isinstance(sizes, list) else [sizes] * num
    if len(sizes) != num:
        raise UnsupportedModel("intermediate_size", sizes, f"a number, or one for each of {num} layers")
    sizes = [ConfigReader({"intermediate_size": size}).integer("intermediate_size") for size in sizes]
    windows = r.windows(lambda i: (i + 1) % 5 != 0, 512)
    sources = sharing(r, windows, 15)
    return usual_config(
        r,
        kind=SmallGemmaConfig,
        max_positions=32768,
        intermediate_size=max(sizes),
        windows=windows,
        num_kv_heads=r.integer("num_key_value_heads", 2),
        logit_softcap=r.limit("final_logit_softcapping", 30.0),
        rope=r.rope(1e6, kind_of_layer="full_attention"),
        per_layer=tuple({"kv_of": i, "intermediate_size": size} for i, size in zip(sources, sizes, strict=True)),
        names=tensor_names(**NORMS, **PER_LAYER, **ALTUP),
        **alike(r),
    )


def gemma4(r: ConfigReader) -> DecoderConfig:
    windows = (*r.windows(lambda i: (i + 1) % 6 != 0, 512)[:-1], None)  # the last is a full one, whatever the file says
    sources, size = sharing(r, windows, 0), r.integer("intermediate_size", 9216)
    wide = size * (1 + r.flag("use_double_wide_mlp", False))
    sparse = r.flag("enable_moe_block", False)
    rope: dict[str, Any] = {"rope_type": "proportional", "theta": 1e6, "partial": 1.0, "share": 0.25}
    if r.config.get("rope_parameters") is not None:
        rope = r.rope(1e6, kind_of_layer="full_attention")
    names = {**NORMS, "scalar": "model.layers.{i}", **(MIXTURE if sparse else {}), **(PER_LAYER if vectors(r) else {})}
    layers = [
        {"kv_of": source, "intermediate_size": size if source is None else wide, **heads(r, i, window)}
        for i, (source, window) in enumerate(zip(sources, windows, strict=True))
    ]
    return usual_config(
        r,
        kind=SmallGemmaConfig,
        max_positions=131072,
        intermediate_size=max(layer["intermediate_size"] for layer in layers),
        windows=windows,
        num_kv_heads=r.integer("num_key_value_heads", 4),
        logit_softcap=r.limit("final_logit_softcapping"),
        rope=rope,
        per_layer=tuple(layers),
        moe=mixture(r, size) if sparse else None,
        names=tensor_names(**names),
        **alike(r),
    )


def alike(r: ConfigReader) -> dict[str, Any]:
    """What both have in common."""
    return common(r) | {
        "norm": "rms",
        "wiring": "sandwich",
        "qk_norm": "head",
        "attn_scale": 1.0,
        "activation": r.activation("hidden_activation", TANH_GELU),
        "window_rope": local_rope(r),
    }


def sharing(r: ConfigReader, windows: Sequence[int | None], default: int) -> list[int | None]:
    """Whose keys and values each layer reads (None: its own): those of the last of its kind before the sharing."""
    num = r.count("num_kv_shared_layers", default)
    first = len(windows) - num
    last = {window: i for i, window in enumerate(windows[: max(first, 0)])}
    if missing := set(windows) - set(last):
        raise UnsupportedModel("num_kv_shared_layers", num, f"fewer: layers with window {missing} have none to read")
    return [None if i < first else last[window] for i, window in enumerate(windows)]


def heads(r: ConfigReader, layer: int, window: int | None) -> dict[str, Any]:
    """Fields of `layer`: newer files list what is peculiar to it, older ones what is peculiar to full layers."""
    k_is_v = window is None and r.flag("attention_k_eq_v", False)
    given = r.config.get("per_layer_config")
    if isinstance(given, Mapping):
        own = ConfigReader(given[str(layer)]) if str(layer) in given else ConfigReader({})
        if unknown := set(own.config) - {"head_dim", "num_key_value_heads"}:
            raise UnsupportedModel(f"per_layer_config.{layer}", sorted(unknown), "head_dim, num_key_value_heads")
        size, kv = own.optional("head_dim"), own.optional("num_key_value_heads")
    else:
        size = None if window else r.integer("global_head_dim", 512)
        kv = r.optional("num_global_key_value_heads") if k_is_v else None
    found = {"head_dim": size, "num_kv_heads": kv, "k_is_v": k_is_v or None}
    return {name: value for name, value in found.items() if value is not None}


def mixture(r: ConfigReader, size: int) -> MoEConfig:
    return MoEConfig(
        num_experts=r.integer("num_experts"),
        top_k=r.integer("top_k_experts"),
        size=r.integer("moe_intermediate_size"),
        layers=(True,) * r.layers(),
        shared_size=size,
    )


def vectors(r: ConfigReader) -> dict[str, int]:
    """Per-layer inputs: length of a layer's vector and rows of the table; empty where there are none."""
    size = r.count("hidden_size_per_layer_input", 256)
    return {"per_layer": size, "per_layer_rows": r.integer("vocab_size_per_layer_input", 262144)} if size else {}


def nano_options(r: ConfigReader) -> dict[str, Any]:
    """`cutoffs`: of each layer's gate, standard deviations above the mean; None: it is not sparse."""
    num = r.layers()
    sparsity = r.config.get("activation_sparsity_pattern")
    if not isinstance(sparsity, list):
        sparsity = [0.95 if num > 10 and i < 10 else 0.0 for i in range(num)] if sparsity is None else [sparsity] * num
    if len(sparsity) != num or not all(isinstance(s, int | float) and 0 <= s < 1 for s in sparsity):
        raise UnsupportedModel("activation_sparsity_pattern", sparsity, f"{num} numbers from 0 to 1")
    streams = r.integer("altup_num_inputs", 4)
    active = r.count("altup_active_idx", 0)
    if active >= streams:
        raise UnsupportedModel("altup_active_idx", active, f"less than {streams}")
    return vectors(r) | {
        "streams": streams,
        "active": active,
        "scaled": r.flag("altup_correct_scale", True),
        "laurel": r.integer("laurel_rank", 64),
        "cutoffs": [NormalDist().inv_cdf(s) if s else None for s in sparsity],
    }

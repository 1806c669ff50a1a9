"""Step 3.5 as data: more heads in windowed layers, a gate for each, experts whose gates are limited. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lmkit.api import LinearSpec, UnsupportedModel
from lmkit_decoders import (
    ConfigReader,
    DecoderArchitecture,
    DecoderConfig,
    corrected_moe,
    stacked,
    tensor_names,
    usual_config,
)

FULL, SLIDING = "full_attention", "sliding_attention"
NAMES = tensor_names(
    attn_gate=".self_attn.g_proj",
    router=".moe.gate",
    correction=".moe.router_bias",
    experts_gate=".moe.gate_proj.weight",
    experts_up=".moe.up_proj.weight",
    experts_down=".moe.down_proj.weight",
    **{f"shared_{part}": f".share_expert.{part}_proj" for part in ("gate", "up", "down")},
)
ONLY = {  # what all released files say
    "moe_router_activation": "sigmoid",
    "use_moe_router_bias": True,
    "norm_expert_weight": True,
    "use_head_wise_attn_gate": True,
    "use_qk_norm": True,
    "zero_centered": True,
    "sink": False,
}


def per_layer(r: ConfigReader, key: str, default: Any) -> list[Any]:
    """A value for each layer: the list at `key`, in which those of drafting layers follow, or one value for all.

    An empty list says nothing.
    """
    value, num = r.config.get(key), r.layers()
    value = None if value == [] else value
    if not isinstance(value, list):
        return [default if value is None else value] * num
    if len(value) < num:
        raise UnsupportedModel(key, value, f"{num} values")
    return value[:num]


def limits(r: ConfigReader, key: str) -> list[float]:
    """What gates and values are limited to in each layer, 0: nothing."""
    return [ConfigReader({key: value}).number(key) if value else 0.0 for value in per_layer(r, key, None)]


def options(r: ConfigReader) -> Mapping[str, Any]:
    return {"limits": limits(r, "swiglu_limits"), "shared_limits": limits(r, "swiglu_limits_shared")}


def rope(r: ConfigReader, kinds: list[str], kind: str) -> dict[str, Any] | None:
    """Rotary parameters of the layers of a kind; None: there are none."""
    values = {
        "rope_theta": per_layer(r, "rope_theta", 10000.0),
        "partial_rotary_factor": per_layer(r, "partial_rotary_factors", 1.0),
    }
    own: dict[str, Any] = {"max_position_embeddings": r.integer("max_position_embeddings", 128000)}
    for key, found in values.items():
        mine = [value for value, each in zip(found, kinds, strict=True) if each == kind]
        if not mine:
            return None
        if any(value != mine[0] for value in mine):
            raise UnsupportedModel(key, mine, f"one value for all layers of {kind}")
        own[key] = mine[0]
    stretched = per_kind(r, "yarn_only_types")
    return ConfigReader({**own, "rope_scaling": r.config.get("rope_scaling") if kind in stretched else None}).rope(
        default_partial=1.0
    )


def per_kind(r: ConfigReader, key: str) -> list[str]:
    value = r.config.get(key) or [FULL]
    if not isinstance(value, list) or any(kind not in (FULL, SLIDING) for kind in value):
        raise UnsupportedModel(key, value, f"kinds of layers: {FULL}, {SLIDING}")
    return value


def heads(r: ConfigReader, kinds: list[str]) -> tuple[dict[str, int], ...]:
    """Numbers of heads of queries."""
    usual = r.integer("num_attention_heads")
    other = usual
    if r.config.get("attention_other_setting") is not None:
        setting = r.nested("attention_other_setting")
        setting.one_of("attention_type", (SLIDING,), SLIDING)
        groups, size = r.integer("num_key_value_heads"), r.integer("head_dim")
        setting.one_of("num_attention_groups", (groups,), groups)
        setting.one_of("head_dim", (size,), size)
        other = setting.integer("num_attention_heads", usual)
    groups = r.integer("num_key_value_heads")
    if other % groups:
        raise UnsupportedModel("attention_other_setting.num_attention_heads", other, f"a multiple of {groups}")
    return tuple({"num_q_heads": other if kind == SLIDING else usual} for kind in kinds)


def sparse(r: ConfigReader) -> tuple[bool, ...]:
    """Which layers have experts."""
    num, value = r.layers(), r.config.get("moe_layers_enum")
    if value is None:
        return tuple(i >= 3 for i in range(num))
    items = [item.strip() for item in value.split(",") if item.strip()] if isinstance(value, str) else value
    if not isinstance(items, list) or any(not str(item).isdecimal() for item in items):
        raise UnsupportedModel("moe_layers_enum", value, "numbers of layers, parted by commas")
    return tuple(i in {int(item) for item in items} for i in range(num))


def step3p5(r: ConfigReader) -> DecoderConfig:
    for key, value in ONLY.items():
        r.one_of(key, (value,), value)
    if not all(per_layer(r, "use_rope_layers", True)):
        raise UnsupportedModel("use_rope_layers", r.config["use_rope_layers"], "positions in all layers")
    r = ConfigReader({**r.config, "layer_types": per_layer(r, "layer_types", FULL)})
    kinds = r.layer_kinds(lambda i: FULL, (FULL, SLIDING))
    full, sliding = rope(r, kinds, FULL), rope(r, kinds, SLIDING)
    bias = r.flag("attention_bias", False)
    return usual_config(
        r,
        max_positions=128000,
        norm="rms_offset",
        norm_eps=r.number("rms_norm_eps", 1e-5),
        qk_norm="head",
        windows=r.windows(),
        rope=full or sliding,
        window_rope=sliding if full else None,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=r.flag("mlp_bias", False),
        per_layer=heads(r, kinds),
        moe=corrected_moe(
            r,
            layers=sparse(r),
            float32=r.flag("need_fp32_gate", False),
            scale=r.number("moe_router_scaling_factor", 1.0),
            shared_size=r.integer("share_expert_dim"),
            renormalize=True,
            num_groups=1,
            top_groups=1,
        ),
        num_unused_layers=r.count("num_nextn_predict_layers", 0),
        names=NAMES,
    )


class Step(DecoderArchitecture):
    configs = {"Step3p5ForCausalLM": step3p5}
    models = {"Step3p5ForCausalLM": "lmkit_model_step.model:StepModel"}
    options = {"Step3p5ForCausalLM": options}
    transforms = {"Step3p5ForCausalLM": dict.fromkeys(("experts_gate", "experts_up", "experts_down"), stacked)}
    spellings = {
        "num_key_value_heads": ("num_attention_groups",),
        "n_routed_experts": ("moe_num_experts",),
        "num_experts_per_tok": ("moe_top_k",),
        "share_expert_dim": ("share_expert_dims",),
    }

    def extra_linears(self, cfg: DecoderConfig, options: Any) -> list[LinearSpec]:
        """The gates of heads."""
        sizes = [(i, cfg.at(i).num_q_heads) for i in range(len(cfg.windows))]
        return [
            LinearSpec(f"layers.{i}.attn.gate", cfg.hidden_size, (n,), False, "column", (), cfg.sources(i, "attn_gate"))
            for i, n in sizes
        ]

    def extra_parameters(self, name: str, cfg: DecoderConfig) -> int:
        return sum(spec.total_out * spec.in_features for spec in self.extra_linears(cfg, {}))

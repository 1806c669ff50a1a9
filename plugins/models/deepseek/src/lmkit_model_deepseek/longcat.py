"""LongCat Flash (https://arxiv.org/abs/2509.01322) as data: latent attention and a mixture on a shortcut. Torch-free.

A layer of the file is two here, each with attention and an MLP. The mixture reads what the first MLP reads, and what it
says is added after the second. Some of its experts give back what they read: they have no weights.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from lmkit.api import LinearSpec, ModelInfo, WeightRule
from lmkit_decoders import (
    EXPERTS,
    LATENT,
    ConfigReader,
    DecoderArchitecture,
    DecoderConfig,
    corrected_moe,
    decoder_config,
    latent_config,
    tensor_names,
    usual_config,
)

NAMES = tensor_names(
    **LATENT,
    **{role: name for role, name in EXPERTS.items() if role.startswith("expert")},
    **{part: f".mlps.{part}_proj" for part in ("gate", "up", "down")},
    router=".mlp.router.classifier",
    correction=".mlp.router.e_score_correction_bias",
)
HALF = re.compile(r"^model\.layers\.(\d+)\.(self_attn|mlps|input_layernorm|post_attention_layernorm)\b")
MIXTURE, AT = "layers.{i}.mlp.", "mixtures.{i}."


def in_file(name: str) -> str:
    """A module as the file calls it: of a layer there, the first or the second."""
    return HALF.sub(lambda found: f"model.layers.{int(found[1]) // 2}.{found[2]}.{int(found[1]) % 2}", name)


def longcat_flash(r: ConfigReader) -> DecoderConfig:
    r.one_of("router_bias", (False,), False)
    r.one_of("norm_topk_prob", (False,), False)
    r.one_of("zero_expert_type", ("identity",), "identity")
    d, num = r.integer("hidden_size"), 2 * r.layers("num_layers")
    moe = corrected_moe(
        r,
        layers=(False,) * num,  # they stand beside these layers
        scoring="softmax",
        renormalize=False,
        scale=r.number("routed_scaling_factor", 6.0),
        num_groups=1,
        top_groups=1,
        shared_size=0,
    )
    given: dict[str, Any] = latent_config(r, r.rope(1e7))
    if r.flag("mla_scale_q_lora", True):
        given["attn_scale"] *= (d / given["mla"].q_rank) ** 0.5
    return usual_config(
        ConfigReader({**r.config, "num_hidden_layers": num}),
        max_positions=131072,
        norm_eps=r.number("rms_norm_eps", 1e-5),
        interleaved=True,
        moe=moe,
        names=NAMES,
        **given,
    )


def others(r: ConfigReader) -> Mapping[str, Any]:
    """The number of experts without weights, and what latents of keys and values are multiplied by."""
    scaled = r.flag("mla_scale_kv_lora", True)
    ratio = r.integer("hidden_size") / r.integer("kv_lora_rank", 512) if scaled else 1.0
    return {"idle": r.count("zero_expert_num", 256), "kv_scale": ratio**0.5}


class Longcat(DecoderArchitecture):
    configs = {"LongcatFlashForCausalLM": longcat_flash}
    models = {"LongcatFlashForCausalLM": "lmkit_model_deepseek.longcat_model:LongcatModel"}
    options = {"LongcatFlashForCausalLM": others}
    targets = {"kv_a_norm": "layers.{i}.attn.kv_a_norm.norm"}
    ignored = ("model.mtp.{any}",)
    defaults = {
        "LongcatFlashForCausalLM": {
            "q_lora_rank": 1536,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "num_attention_heads": 64,
        }
    }
    spellings = {
        "intermediate_size": ("ffn_hidden_size",),
        "moe_intermediate_size": ("expert_ffn_hidden_size",),
        "num_experts_per_tok": ("moe_topk",),
        "n_routed_experts": ("num_local_experts",),
    }

    def describe(self, config: Mapping[str, object]) -> ModelInfo:
        info = super().describe(config)
        cfg, given = decoder_config(info), info.config["options"]
        assert cfg.moe is not None
        assert isinstance(given, Mapping)
        num = len(info.layers) // 2
        new = [spec for n in range(num) for spec in mixture_linears(cfg, n)]
        routers = num * (cfg.moe.num_experts + given["idle"]) * (cfg.hidden_size + 1)
        own = tuple(replace(spec, sources=tuple(map(in_file, spec.sources))) for spec in info.linears)
        more = routers + sum(spec.total_out * spec.in_features for spec in new)
        return replace(info, linears=(*own, *new), num_parameters=info.num_parameters + more)

    def weights(self, info: ModelInfo) -> list[WeightRule]:
        rules = super().weights(info)
        mixtures = [rule for rule in rules if rule.target.startswith(MIXTURE) and ".mlps." not in rule.source]
        first = [replace(rule, target=rule.target.replace(MIXTURE, AT)) for rule in mixtures]
        return first + [
            each for rule in rules if rule not in mixtures for each in halves(rule, range(len(info.layers)))
        ]


def mixture_linears(cfg: DecoderConfig, n: int) -> Iterable[LinearSpec]:
    """The linears of the mixture in layer `n` of the file."""
    assert cfg.moe is not None
    for spec in cfg.moe.linears(cfg, n):
        yield replace(spec, name=spec.name.replace(MIXTURE.format(i=n), AT.format(i=n)))


def halves(rule: WeightRule, layers: Iterable[int]) -> list[WeightRule]:
    """The rule for each layer, whose number the file does not know."""
    if "{i}" not in rule.source:
        return [rule]
    pairs = [(rule.source.replace("{i}", str(i)), rule.target.replace("{i}", str(i))) for i in layers]
    return [replace(rule, source=in_file(source), target=target) for source, target in pairs]

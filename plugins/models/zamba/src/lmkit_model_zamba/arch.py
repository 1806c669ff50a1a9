"""Zamba 2 (https://arxiv.org/abs/2411.15242) as data. Torch-free.

Every layer is Mamba 2. Some read more than the residual stream: a block of attention and MLP sees it beside the
embeddings, and what the block says is added to what Mamba reads. There are one or two such blocks, used in turn; each
use has adapters of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import inf
from typing import Any

from lmkit.api import LinearSpec, ModelInfo, UnsupportedModel, WeightRule
from lmkit_decoders import (
    MAMBA,
    ConfigReader,
    DecoderArchitecture,
    DecoderConfig,
    decoder_config,
    mamba2_mixer,
    mamba_names,
    negative_exp,
    tensor_names,
    usual_config,
)

KINDS = ("linear_attention", "hybrid", "mamba")  # "mamba": in older files
ROLES = ("mlp_norm", "q", "k", "v", "o", "q_norm", "k_norm", "sinks", "gate", "up", "down")  # of no layer alone
NAMES = tensor_names(norm="model.final_layernorm", **dict.fromkeys(ROLES, ""), **mamba_names(".mamba"))
SHARED = "model.layers.{i}.shared_transformer"


def zamba2(r: ConfigReader) -> DecoderConfig:
    d, heads, groups = r.integer("hidden_size"), r.integer("num_attention_heads", 32), r.integer("mamba_ngroups", 1)
    inner, mamba_heads = r.integer("mamba_expand", 2) * d, r.integer("n_mamba_heads", 8)
    if inner % mamba_heads or mamba_heads % groups:
        raise UnsupportedModel("n_mamba_heads", mamba_heads, f"a divisor of {inner}, in {groups} groups")
    r.one_of("use_long_context", (False,), False)
    bias = r.flag("add_bias_linear", False)
    mixer = mamba2_mixer(
        layers=(True,) * r.layers(),
        hidden_size=d,
        heads=mamba_heads,
        head_dim=inner // mamba_heads,
        groups=groups,
        state_size=r.integer("mamba_d_state", 64),
        width=r.kernel_width("mamba_d_conv", 4),
        bias=bias,
        norm_groups=groups,
        norm_eps=1e-5,
        dt_limits=(r.number("time_step_min", 0.001), inf),
    )
    return usual_config(
        r,
        max_positions=4096,
        intermediate_size=r.integer("intermediate_size", 4 * d),
        num_q_heads=heads,
        num_kv_heads=r.integer("num_key_value_heads", heads),
        head_dim=2 * d // heads,
        attn_scale=(d // heads) ** -0.5,
        activation=r.activation("hidden_act", "gelu"),
        norm_eps=r.number("rms_norm_eps", 1e-5),
        rope=r.rope() if r.flag("use_mem_rope", False) else None,
        tie=r.one_of("tie_word_embeddings", (True,), True),  # else the library does not share blocks either
        mlp_bias=bias,
        wiring="alone",
        mixer=mixer,
        names=NAMES,
    )


def blocks(r: ConfigReader) -> Mapping[str, Any]:
    """The layers that use a block, the number of blocks, and the rank of adapters to attention (0: none) and MLP."""
    kinds = r.layer_kinds(lambda i: "", KINDS, "layers_block_type")
    rank, attention = r.integer("adapter_rank", 128), r.flag("use_shared_attention_adapter", False)
    heads = r.integer("num_attention_heads", 32)
    if attention and r.integer("num_key_value_heads", heads) != heads:
        raise UnsupportedModel("num_key_value_heads", r.config["num_key_value_heads"], f"{heads}: adapters need it")
    uses = [i for i, kind in enumerate(kinds) if kind == "hybrid"]
    blocks = min(r.integer("num_mem_blocks", 1), len(uses))
    return {"uses": uses, "blocks": blocks, "attention_rank": rank * attention, "mlp_rank": rank}


def block_linears(cfg: DecoderConfig, given: Mapping[str, Any]) -> list[LinearSpec]:
    """The linears of the blocks, and of their uses."""
    d, m, q, kv = (
        cfg.hidden_size,
        cfg.intermediate_size,
        *(n * cfg.head_dim for n in (cfg.num_q_heads, cfg.num_kv_heads)),
    )
    specs = []
    for n, layer in enumerate(given["uses"][: given["blocks"]]):
        to, attn, mlp = f"blocks.{n}", *(f"{SHARED.format(i=layer)}.{part}" for part in ("self_attn", "feed_forward"))
        sources = tuple(f"{attn}.{part}_proj" for part in "qkv")
        specs += [
            LinearSpec(f"{to}.qkv", 2 * d, (q, kv, kv), False, "none", ("q", "k", "v"), sources),
            LinearSpec(f"{to}.o", q, (d,), False, "none", (), (f"{attn}.o_proj",)),
            LinearSpec(f"{to}.gate_up", d, (m, m), cfg.mlp_bias, "none", ("gate", "up"), (f"{mlp}.gate_up_proj",)),
            LinearSpec(f"{to}.down", m, (d,), cfg.mlp_bias, "none", (), (f"{mlp}.down_proj",)),
        ]
    for n, layer in enumerate(given["uses"]):
        specs.append(LinearSpec(f"uses.{n}.out", d, (d,), False, "none", (), (f"model.layers.{layer}.linear",)))
        if rank := given["attention_rank"]:
            specs.append(LinearSpec(f"uses.{n}.qkv_in", 2 * d, (rank,) * 3, False, "none", ("q", "k", "v")))
            specs += [LinearSpec(f"uses.{n}.{part}_out", rank, (2 * d,)) for part in "qkv"]
        specs.append(LinearSpec(f"uses.{n}.mlp_in", d, (given["mlp_rank"],)))
        specs.append(LinearSpec(f"uses.{n}.mlp_out", given["mlp_rank"], (2 * m,)))
    return specs


class Zamba(DecoderArchitecture):
    configs = {"Zamba2ForCausalLM": zamba2}
    models = {"Zamba2ForCausalLM": "lmkit_model_zamba.model:ZambaModel"}
    options = {"Zamba2ForCausalLM": blocks}
    transforms = {"Zamba2ForCausalLM": {"mamba_A": negative_exp}}
    targets = MAMBA

    def describe(self, config: Mapping[str, object]) -> ModelInfo:
        info = super().describe(config)
        cfg, given = decoder_config(info), info.config["options"]
        assert isinstance(given, Mapping)
        specs = block_linears(cfg, given)
        layers = [
            replace(layer, attn=cfg.need(i)) if i in given["uses"] else layer for i, layer in enumerate(info.layers)
        ]
        more = sum(s.total_out * (s.in_features + s.bias) for s in specs) + 3 * cfg.hidden_size * given["blocks"]
        linears = (*specs, *info.linears)
        return replace(info, layers=tuple(layers), linears=linears, num_parameters=info.num_parameters + more)

    def weights(self, info: ModelInfo) -> list[WeightRule]:
        """In layers that use a block, Mamba is one module deeper. Files may repeat a block in each such layer."""
        given: Any = info.config["options"]
        own = super().weights(info)
        layer = "model.layers.{i}."
        deeper = [
            replace(r, source=r.source.replace(layer, f"{layer}mamba_decoder.")) for r in own if layer in r.source
        ]
        rules = [rule for n, i in enumerate(given["uses"][: given["blocks"]]) for rule in block_rules(n, i)]
        rules += [
            WeightRule(f"model.layers.{i}.linear.{{p}}", f"uses.{n}.out.{{p}}") for n, i in enumerate(given["uses"])
        ]
        repeated = [
            WeightRule(f"{SHARED.format(i=i)}.{{any}}", "", ignore=True) for i in given["uses"][given["blocks"] :]
        ]
        return rules + repeated + own + deeper


def block_rules(n: int, layer: int) -> list[WeightRule]:
    """The rules of block `n`, which files have in `layer`, with the adapters of its uses."""
    at, to = SHARED.format(i=layer), f"blocks.{n}"
    attn, mlp = f"{at}.self_attn", f"{at}.feed_forward"
    rules = [
        WeightRule(f"{at}.input_layernorm.{{p}}", f"{to}.attn_norm.{{p}}"),
        WeightRule(f"{at}.pre_ff_layernorm.{{p}}", f"{to}.mlp_norm.{{p}}"),
        WeightRule(f"{attn}.o_proj.{{p}}", f"{to}.o.{{p}}"),
        WeightRule(f"{mlp}.gate_up_proj.{{p}}", f"{to}.gate_up.{{p}}", "*"),
        WeightRule(f"{mlp}.down_proj.{{p}}", f"{to}.down.{{p}}"),
        WeightRule(f"{mlp}.gate_up_proj_adapter_list.{{n}}.0.{{p}}", "uses.{n}.mlp_in.{p}"),
        WeightRule(f"{mlp}.gate_up_proj_adapter_list.{{n}}.1.{{p}}", "uses.{n}.mlp_out.{p}"),
    ]
    for part in "qkv":
        rules += [
            WeightRule(f"{attn}.{part}_proj.{{p}}", f"{to}.qkv.{{p}}", part),
            WeightRule(f"{attn}.linear_{part}_adapter_list.{{n}}.0.{{p}}", "uses.{n}.qkv_in.{p}", part),
            WeightRule(f"{attn}.linear_{part}_adapter_list.{{n}}.1.{{p}}", f"uses.{{n}}.{part}_out.{{p}}"),
        ]
    return rules

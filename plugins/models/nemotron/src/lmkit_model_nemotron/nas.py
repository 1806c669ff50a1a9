"""Nemotron NAS (https://arxiv.org/abs/2411.19146) as data: a Llama whose layers were chosen one by one. Torch-free.

Attention has its own number of heads of keys and values in each layer and the MLP its own size; a linear stands in
place of either, or nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from lmkit.api import LinearSpec, ModelInfo, UnsupportedModel
from lmkit_decoders import ConfigReader, DecoderArchitecture, DecoderConfig, decoder_config, tensor_names, usual_config

NAMES = tensor_names(linear_attn=".self_attn.linear_attn", linear_mlp=".mlp.linear_mlp")
USUAL, LINEAR, NOTHING = "usual", "linear", "nothing"
UNKNOWN = ("sparsify", "window_length", "num_sink_tokens", "unshifted_sink", "use_prefill_window_in_sink_attention")


def blocks(r: ConfigReader) -> list[tuple[ConfigReader, ConfigReader]]:
    """What files say about attention and MLP of each layer; older ones list numbers of heads alone."""
    heads = r.integer("num_attention_heads")
    given = r.config.get("block_configs")
    if given is None and isinstance(kv := r.config.get("num_key_value_heads_per_layer"), list):
        sizes = [
            ConfigReader({"num_key_value_heads_per_layer": n}).integer("num_key_value_heads_per_layer") for n in kv
        ]
        given = [{"attention": {"n_heads_in_group": heads // n or heads + 1}, "ffn": {}} for n in sizes]
    if not isinstance(given, list) or len(given) != r.layers():
        raise UnsupportedModel("block_configs", given, f"an object for each of {r.layers()} layers")
    readers = [ConfigReader({"block_configs": block}).nested("block_configs") for block in given]
    return [(block.nested("attention"), block.nested("ffn")) for block in readers]


def kind(block: ConfigReader) -> str:
    """What stands in a block's place."""
    if block.flag("no_op", False):
        return NOTHING
    if block.flag("replace_with_linear", False):
        return LINEAR
    for key in UNKNOWN:
        block.one_of(key, (None, False))
    return USUAL


def kinds(r: ConfigReader) -> Mapping[str, Any]:
    """The kinds of all layers, as the configuration lists them."""
    both = blocks(r)
    return {"attn": [kind(attention) for attention, _ in both], "mlp": [kind(ffn) for _, ffn in both]}


def groups(r: ConfigReader, attention: ConfigReader) -> int:
    """The number of heads of keys and values in a layer that has attention."""
    heads, share = r.integer("num_attention_heads"), attention.integer("n_heads_in_group")
    if heads % share:
        raise UnsupportedModel("n_heads_in_group", share, f"a divisor of {heads}")
    return heads // share


def width(r: ConfigReader, ffn: ConfigReader) -> int:
    """The size of a layer's MLP: two thirds of a multiple of the hidden size, rounded up to a multiple of 256."""
    if ffn.config.get("ffn_mult") is None:
        return r.integer("intermediate_size")
    size = int(2 * ffn.number("ffn_mult") * r.integer("hidden_size") / 3)
    return ConfigReader({"ffn_mult": -(-size // 256) * 256}).integer("ffn_mult")


@dataclass(frozen=True, slots=True, kw_only=True)
class NasConfig(DecoderConfig):
    without_attention: tuple[int, ...] = ()  # layers in which a linear, or nothing, stands in its place

    def attends(self, layer: int) -> bool:
        return layer not in self.without_attention


def nemotron_nas(r: ConfigReader) -> DecoderConfig:
    layers: list[dict[str, int]] = []
    for attention, ffn in blocks(r):
        own = {"num_kv_heads": groups(r, attention)} if kind(attention) == USUAL else {}
        layers.append(own | ({"intermediate_size": width(r, ffn)} if kind(ffn) == USUAL else {}))
    bias = r.flag("attention_bias", False)
    return usual_config(
        r,
        kind=NasConfig,
        max_positions=2048,
        num_kv_heads=max((layer.get("num_kv_heads", 1) for layer in layers), default=1),
        intermediate_size=max((layer.get("intermediate_size", 1) for layer in layers), default=1),
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=r.flag("mlp_bias", False),
        without_attention=tuple(i for i, kind in enumerate(kinds(r)["attn"]) if kind != USUAL),
        per_layer=tuple(layers),
        names=NAMES,
    )


class NemotronNas(DecoderArchitecture):
    configs = {"DeciLMForCausalLM": nemotron_nas}
    models = {"DeciLMForCausalLM": "lmkit_model_nemotron.nas_model:NemotronNasModel"}
    config = NasConfig
    options = {"DeciLMForCausalLM": kinds}
    targets = {"linear_attn": "layers.{i}.attn.linear", "linear_mlp": "layers.{i}.mlp.linear"}

    def describe(self, config: Mapping[str, object]) -> ModelInfo:
        info = super().describe(config)
        cfg, given = decoder_config(info, NasConfig), info.config["options"]
        assert isinstance(given, Mapping)
        other = {f"layers.{i}.mlp" for i, kind in enumerate(given["mlp"]) if kind != USUAL}
        gone = [spec for spec in info.linears if spec.name.rpartition(".")[0] in other]
        kept = [spec for spec in info.linears if spec not in gone]
        new = [spec for block in ("attn", "mlp") for spec in linears(cfg, given, block)]
        norms = sum(kind == NOTHING for block in ("attn", "mlp") for kind in given[block])
        num = info.num_parameters + parameters(new) - parameters(gone) - norms * cfg.hidden_size
        return replace(info, linears=(*kept, *new), num_parameters=num)


def linears(cfg: DecoderConfig, given: Mapping[str, Any], block: str) -> list[LinearSpec]:
    """Those that stand in place of a block."""
    d, at = cfg.hidden_size, [i for i, kind in enumerate(given[block]) if kind == LINEAR]
    return [LinearSpec(f"layers.{i}.{block}.linear", d, (d,), sources=cfg.sources(i, f"linear_{block}")) for i in at]


def parameters(specs: list[LinearSpec]) -> int:
    return sum(spec.total_out * (spec.in_features + spec.bias) for spec in specs)

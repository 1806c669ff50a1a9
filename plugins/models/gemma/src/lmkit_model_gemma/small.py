"""Gemma 3n and 4 (text) as data. Torch-free.

Each layer gets a vector of its own for each token (per-layer inputs), and the last layers read the keys and values of
earlier ones. Gemma 3n adds residuals of low rank (LAuReL, https://arxiv.org/abs/2411.07501), several residual streams
(AltUp, https://arxiv.org/abs/2301.13310) and sparse activations; Gemma 4 wider heads in full layers, keys that are the
values too, and experts beside the MLP.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from lmkit.api import LinearSpec, ModelInfo, WeightRule
from lmkit_decoders import DecoderArchitecture, DecoderConfig, decoder_config, stacked
from lmkit_decoders.multimodal import ENDING, text_rules

from lmkit_model_gemma.small_config import SmallGemmaConfig, gemma3n, gemma4, nano_options, vectors

NANO = ("Gemma3nForCausalLM", "Gemma3nForConditionalGeneration")
FOUR = ("Gemma4ForCausalLM", "Gemma4ForConditionalGeneration")
LINEARS = {  # role -> module in a layer
    "per_layer_gate": "per_layer.gate",
    "per_layer_out": "per_layer.out",
    "laurel_left": "laurel.left",
    "laurel_right": "laurel.right",
}


class SmallGemma(DecoderArchitecture):
    configs = dict.fromkeys(NANO, gemma3n) | dict.fromkeys(FOUR, gemma4)
    models = dict.fromkeys(NANO, "lmkit_model_gemma.nano:Gemma3n") | dict.fromkeys(
        FOUR, "lmkit_model_gemma.four:Gemma4"
    )
    config = SmallGemmaConfig
    options = {**dict.fromkeys(NANO, nano_options), **dict.fromkeys(FOUR, vectors)}
    transforms = {name: {"experts_up": stacked, "experts_down": stacked} for name in FOUR}
    targets = {
        **{role: f"layers.{{i}}.{module}" for role, module in LINEARS.items()},
        "per_layer_embed": "per_layer.embed",
        "per_layer_projection": "per_layer.projection",
        "per_layer_embed_norm": "per_layer.norm",
        "per_layer_norm": "layers.{i}.per_layer.norm",
        "laurel_norm": "layers.{i}.laurel.norm",
        "altup_in": "altup_in.{n}",
        "altup_out": "altup_out.{n}",
        **{f"altup_{part}": f"layers.{{i}}.altup.{part}" for part in ("router_norm", "router")},
        **{f"altup_{part}": f"layers.{{i}}.altup.{part}" for part in ("prediction", "correction")},
        "altup": "layers.{i}.altup",
        "scalar": "layers.{i}",
        "router_scales": "layers.{i}.mlp.router",
        **{f"{part}_norm": f"layers.{{i}}.mlp.{part}_norm" for part in ("shared_post", "experts_post", "experts")},
    }

    def extra_linears(self, cfg: DecoderConfig, options: Any) -> list[LinearSpec]:
        """Those of `additions`."""
        return additions(cfg, options)[0]

    def weights(self, info: ModelInfo) -> list[WeightRule]:
        """Some files have keys and values of layers that read those of others: they are not needed."""
        names = info.config["names"]
        assert isinstance(names, Mapping)
        kv = [names[role] for role in ("k", "v", "k_norm") if role in names]
        layers = [layer.index for layer in info.layers if layer.kv_of is not None]
        unread = [WeightRule(f"{name.format(i=i)}.{{p}}", "", ignore=True) for i in layers for name in kv]
        whole = text_rules(unread) if info.architecture.endswith(ENDING) else unread
        return [*whole, *super().weights(info)]

    def describe(self, config: Mapping[str, object]) -> ModelInfo:
        info = super().describe(config)
        linears, other = additions(decoder_config(info, self.config), info.config["options"])
        more = sum(spec.in_features * spec.total_out for spec in linears)
        return replace(info, num_parameters=info.num_parameters + more + sum(other))


def additions(cfg: DecoderConfig, options: Any) -> tuple[list[LinearSpec], list[int]]:
    """Linears beside those of the shared blocks, and the numbers of other parameters."""
    num, d = len(cfg.windows), cfg.hidden_size
    shapes: dict[str, tuple[int, int]] = {}
    linears, other = [], [num] if "scalar" in cfg.names else []
    if size := options.get("per_layer"):
        shapes |= {"per_layer_gate": (d, size), "per_layer_out": (size, d)}
        linears.append(linear(cfg, "per_layer.projection", "per_layer_projection", d, num * size))
        other += [options["per_layer_rows"] * num * size, size, num * d]
    if rank := options.get("laurel"):
        shapes |= {"laurel_left": (d, rank), "laurel_right": (rank, d)}
        streams = options["streams"]
        linears += [
            linear(cfg, f"{role}.{n}", role, d, d, n) for role in ("altup_in", "altup_out") for n in range(streams - 1)
        ]
        other.append(num * (3 * d + streams * d + streams**2 + streams**3))
    if cfg.moe is not None:
        other.append(num * (4 * d + cfg.moe.num_experts))
    return linears + [
        linear(cfg, f"layers.{i}.{LINEARS[role]}", role, *shape, i)
        for i in range(num)
        for role, shape in shapes.items()
    ], other


def linear(cfg: DecoderConfig, name: str, role: str, inputs: int, outputs: int, n: int = 0) -> LinearSpec:
    return LinearSpec(name, inputs, (outputs,), sources=(cfg.names[role].format(i=n, n=n),))

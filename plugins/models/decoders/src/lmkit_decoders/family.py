"""A family of decoders: what its file has to say, and nothing else. Torch-free."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar

from lmkit.api import Architecture, LinearSpec, ModelInfo, StateTensor, UnsupportedModel, WeightRule

from lmkit_decoders import further
from lmkit_decoders.describe import (
    DecoderConfig,
    LatentConfig,
    MixerConfig,
    MoEConfig,
    decoder_config,
    decoder_info,
)
from lmkit_decoders.further import FurtherLayer
from lmkit_decoders.multimodal import ENDING, text_config, text_linears, text_rules
from lmkit_decoders.places import Target
from lmkit_decoders.reader import ConfigReader
from lmkit_decoders.weights import decoder_weights

if TYPE_CHECKING:
    from lmkit.api import BuildContext, Model
    from torch import Tensor


class DecoderArchitecture(Architecture):
    """An Architecture made of tables.

    `configs`: architecture name -> function that reads its configuration; of a multimodal one that of its text part.
    `config`: class of what `configs` give, where it is the family's own.
    `models`: architecture name -> "package.module:Class" of those that are not the shared Decoder.
    `transforms`: architecture name -> role of a tensor -> (configuration, tensor) -> what is loaded.
    `options`: architecture name -> function that reads what is the family's own: `info.config["options"]`.
    `targets`: role that is the family's own -> module of the model, (module, part of it), or another `Place`.
    `ignored`: patterns of tensors that are not needed.
    `prefix`: what the names of tensors begin with in some files and not in others.
    `defaults`: architecture name -> what keys mean that a file leaves out; null is not left out.
    `spellings`: key -> its names in other files, which count where it is missing.
    `drafts`: name of a draft -> the layer of a checkpoint that it is. FooMTP guesses for FooForCausalLM.
    """

    configs: ClassVar[Mapping[str, Callable[[ConfigReader], DecoderConfig]]]
    config: ClassVar[type[DecoderConfig]] = DecoderConfig
    models: ClassVar[Mapping[str, str]] = {}
    transforms: ClassVar[Mapping[str, Mapping[str, Callable[[DecoderConfig, Tensor], Tensor]]]] = {}
    options: ClassVar[Mapping[str, Callable[[ConfigReader], Mapping[str, Any]]]] = {}
    targets: ClassVar[Mapping[str, Target]] = {}
    ignored: ClassVar[tuple[str, ...]] = ()
    prefix: ClassVar[str] = ""
    defaults: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    spellings: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    drafts: ClassVar[Mapping[str, FurtherLayer]] = {}

    @property
    def names(self) -> tuple[str, ...]:  # type: ignore[override]
        return (*self.configs, *self.drafts)

    def describe(self, config: Mapping[str, object]) -> ModelInfo:
        name = ConfigReader(config).architecture(self.names)
        config = text_config(config) if name.endswith(ENDING) else config
        other = {key: config[name] for key, names in self.spellings.items() for name in names if name in config}
        draft = self.drafts.get(name)
        base = name if draft is None else draft.of
        reader = ConfigReader({**self.defaults.get(base, {}), **other, **config})
        cfg = self.configs[base](reader)
        if draft is not None:
            cfg = draft.config(cfg)
            info = decoder_info(name, reader, cfg, (2 * cfg.hidden_size + 2 - cfg.vocab_size) * cfg.hidden_size)
            return replace(info, linears=(*info.linears, draft.linear(cfg)))
        info = decoder_info(name, reader, cfg, self.extra_parameters(name, cfg))
        if name in self.options:
            info = replace(info, config={**info.config, "options": dict(self.options[name](reader))})
        linears = (*info.linears, *self.extra_linears(cfg, info.config.get("options", {})))
        sources = (source for spec in linears if not spec.experts and not spec.is_head for source in spec.sources)
        targets = dict.fromkeys([*info.adapter_targets, *(source.rpartition(".")[2] for source in sources)])
        linears = text_linears(linears) if name.endswith(ENDING) else linears
        return replace(info, linears=linears, adapter_targets=tuple(targets))

    def extra_linears(self, cfg: DecoderConfig, options: Any) -> list[LinearSpec]:
        """Linears beside those of the shared blocks."""
        return []

    def extra_parameters(self, name: str, cfg: DecoderConfig) -> int:
        """Number of parameters beside those of the shared blocks."""
        return 0

    def build(self, info: ModelInfo, ctx: BuildContext) -> Model:
        usual = further.MODEL if info.architecture in self.drafts else "lmkit_decoders.decoder:Decoder"
        module, _, name = self.models.get(info.architecture, usual).partition(":")
        return getattr(import_module(module), name)(info, ctx)

    def weights(self, info: ModelInfo) -> list[WeightRule]:
        ignored = [WeightRule(source, "", ignore=True) for source in self.ignored]
        transforms = self.transforms.get(info.architecture, {})
        cfg = decoder_config(info, self.config)
        bound = {role: partial(function, cfg) for role, function in transforms.items()}
        draft = self.drafts.get(info.architecture)
        targets = self.targets if draft is None else {**self.targets, **further.TARGETS}
        rules = decoder_weights(info, bound, targets, cfg)
        if draft is not None:
            return draft.rules(rules)
        rules = [*ignored, *rules]
        if info.architecture.endswith(ENDING):
            rules = text_rules(rules)
        if not self.prefix:
            return rules
        return rules + [replace(rule, source=rule.source.removeprefix(self.prefix)) for rule in rules]


def corrected_moe(r: ConfigReader, **given: Any) -> MoEConfig:
    """Experts with sigmoid scores, chosen from the best groups by scores that a bias corrects, under the usual keys.

    Fields in `given` are not read.
    """
    size = given.pop("size", None) or r.integer("moe_intermediate_size")
    read: dict[str, Callable[[], Any]] = {
        "num_experts": lambda: r.integer("n_routed_experts"),
        "top_k": lambda: r.integer("num_experts_per_tok"),
        "layers": lambda: tuple(i >= r.count("first_k_dense_replace", 0) for i in range(r.layers())),
        "scoring": lambda: "sigmoid",
        "correction": lambda: True,
        "float32": lambda: True,
        "renormalize": lambda: r.flag("norm_topk_prob", True),
        "epsilon": lambda: 1e-20,
        "scale": lambda: r.number("routed_scaling_factor", 1.0),
        "num_groups": lambda: r.integer("n_group", 1),
        "top_groups": lambda: r.integer("topk_group", 1),
        "group_score": lambda: "two best",
        "shared_size": lambda: size * r.count("n_shared_experts", 0),
    }
    values = {name: value() for name, value in read.items() if name not in given}
    return MoEConfig(size=size, **values, **given)


def latent_config(r: ConfigReader, rope: Mapping[str, Any] | None) -> dict[str, Any]:
    """The fields of a decoder with latent attention under the usual keys. A YaRN `mscale_all_dim` sharpens it."""
    heads, plain, turned = (r.integer(key) for key in ("num_attention_heads", "qk_nope_head_dim", "qk_rope_head_dim"))
    mla = LatentConfig(
        q_rank=r.count("q_lora_rank", 0),
        kv_rank=r.integer("kv_lora_rank", 512),
        plain=plain,
        turned=turned,
        value=r.integer("v_head_dim"),
    )
    bias = r.flag("attention_bias", False)
    sharp = 1.0
    if rope is not None and rope["rope_type"] == "yarn" and rope["factor"] > 1:
        sharp = 0.1 * rope.get("mscale_all_dim", 0.0) * math.log(rope["factor"]) + 1
    return {
        "mla": mla,
        "rope": rope,
        "num_q_heads": heads,
        "num_kv_heads": heads,
        "head_dim": plain + turned,
        "attn_scale": (plain + turned) ** -0.5 * sharp**2,
        "qkv_bias": bias,
        "o_bias": bias,
    }


def delta_mixer(
    r: ConfigReader,
    *,
    layers: tuple[bool, ...],
    k_heads: int,
    v_heads: int,
    k_dim: int,
    v_dim: int,
    eps: float,
    beta: float = 1.0,
    parts: tuple[str, ...] = ("q", "k", "v", "z"),
) -> MixerConfig:
    """Gated delta nets (`lmkit_decoders.delta`): heads of keys and of values and their sizes, `eps` of the norm.

    `beta`: the largest share of a value that is written. `parts`: how files divide the projection of queries, keys,
    values and the output's gate. Roles: delta_PART, delta_b, delta_a, delta_o, delta_scale, delta_conv or
    delta_conv_q, _k and _v, and delta for the single tensors.
    """
    if v_heads % k_heads:
        raise UnsupportedModel("linear_num_key_heads", k_heads, f"a divisor of {v_heads}")
    d, width = r.integer("hidden_size"), r.kernel_width("linear_conv_kernel_dim", 4)
    k, v = k_heads * k_dim, v_heads * v_dim
    channels, sizes = 2 * k + v, {"q": k, "k": k, "v": v, "qkv": 2 * k + v, "z": v}

    def linear(name: str, num: int, split: tuple[str, ...]) -> LinearSpec:
        sources = tuple(f"delta_{part}" for part in (name, *split))
        return LinearSpec(name, d, tuple(sizes.get(part, num) for part in split), False, "none", split, sources)

    return MixerConfig(
        layers=layers,
        state=(StateTensor("conv", (width - 1, channels)), StateTensor("delta", (v_heads, k_dim, v_dim))),
        linears=(
            linear("qkvz", 0, parts),
            linear("ba", v_heads, ("b", "a")),
            LinearSpec("o", v, (d,), False, "none", (), ("delta_o",)),
        ),
        num_parameters=channels * width + 2 * v_heads + v_dim,
        options={"k_heads": k_heads, "v_heads": v_heads, "k_dim": k_dim, "v_dim": v_dim, "eps": eps, "beta": beta}
        | {"width": width},
    )


DELTA: Mapping[str, Target] = {  # targets of its roles
    "delta_qkvz": ("{mixer}.qkvz", "*"),
    "delta_ba": ("{mixer}.ba", "*"),
    **{f"delta_{part}": ("{mixer}.qkvz", part) for part in ("q", "k", "v", "qkv", "z")},
    **{f"delta_{part}": ("{mixer}.ba", part) for part in "ba"},
    "delta_o": "{mixer}.o",
    "delta_scale": "{mixer}.norm",
    "delta_conv": ("{mixer}.conv", "*"),
    **{f"delta_conv_{part}": ("{mixer}.conv", part) for part in "qkv"},
    "delta": "{mixer}",
}
LATENT: Mapping[str, str] = {  # usual names of its tensors
    "q_a": ".self_attn.q_a_proj",
    "q_a_norm": ".self_attn.q_a_layernorm",
    "q_b": ".self_attn.q_b_proj",
    "kv_a": ".self_attn.kv_a_proj_with_mqa",
    "kv_a_norm": ".self_attn.kv_a_layernorm",
    "kv_b": ".self_attn.kv_b_proj",
    "k": "",
    "v": "",
}
EXPERTS: Mapping[str, str] = {  # their usual names
    "router": ".mlp.gate",
    "correction": ".mlp.gate.e_score_correction_bias",
    **{f"expert_{p}": f".mlp.experts.{{e}}.{p}_proj" for p in ("gate", "up", "down")},
    **{f"shared_{p}": f".mlp.shared_experts.{p}_proj" for p in ("gate", "up", "down")},
}

EACH_EXPERT: Mapping[str, Target] = {  # places of experts that a file holds one by one where others stack them
    "each_gate": ("layers.{i}.mlp.experts.up", "{e}.gate"),
    "each_up": ("layers.{i}.mlp.experts.up", "{e}.up"),
    "each_down": ("layers.{i}.mlp.experts.down", "{e}"),
}


def each_expert(block: str) -> dict[str, str]:
    """Their names in a layer's `block` (".mlp")."""
    return {f"each_{p}": f"{block}.experts.{{e}}.{p}_proj" for p in ("gate", "up", "down")}


def split_per_head(cfg: DecoderConfig, fused: Tensor) -> Tensor:
    """A projection stored head by head as query, key, value [Hq * 3 * D, ...] -> all queries, all keys, all values."""
    return fused.reshape(cfg.num_q_heads, 3, cfg.head_dim, *fused.shape[1:]).transpose(0, 1).reshape(fused.shape)


def split_per_group(cfg: DecoderConfig, fused: Tensor) -> Tensor:
    """Stored for each key-value head as its queries, key and value -> all queries, all keys, all values."""
    import torch

    share = cfg.num_q_heads // cfg.num_kv_heads
    groups = fused.reshape(cfg.num_kv_heads, share + 2, cfg.head_dim, *fused.shape[1:])
    return torch.cat([part.flatten(0, 2) for part in groups.split((share, 1, 1), dim=1)])


def transposed(cfg: DecoderConfig, weight: Tensor) -> Tensor:
    """A weight stored [in, out] -> [out, in]; a bias as it is."""
    return weight.T if weight.dim() == 2 else weight


def stacked(cfg: DecoderConfig, weight: Tensor) -> Tensor:
    """Experts [E, out, in] -> [E * out, in]; their biases [E, out] -> [E * out]."""
    return weight.flatten(0, 1)

"""A decoder as data, made from a checkpoint's configuration, and where its tensors come from. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from lmkit.api import AttnNeed, LayerInfo, LinearSpec, ModelInfo, NormKind, UnsupportedModel, WeightRule
from lmkit.layers.reader import REQUIRED, ConfigReader, rope_length

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["ConfigReader", "DecoderConfig", "decoder_config", "decoder_info", "decoder_weights", "rope_length"]

Placement = Literal["pre", "post", "sandwich", "parallel", "parallel_two_norms"]


def tensor_names(layer: str = "model.layers.{i}", **roles: str) -> dict[str, str]:
    """Checkpoint module of each role: Llama's names, those of `roles` instead ("": there is none).

    A name with a leading dot is in a layer.
    """
    usual = {
        "embed": "model.embed_tokens", "norm": "model.norm", "lm_head": "lm_head",
        "attn_norm": ".input_layernorm", "mlp_norm": ".post_attention_layernorm",
        "q": ".self_attn.q_proj", "k": ".self_attn.k_proj", "v": ".self_attn.v_proj", "o": ".self_attn.o_proj",
        "q_norm": ".self_attn.q_norm", "k_norm": ".self_attn.k_norm",
        "gate": ".mlp.gate_proj", "up": ".mlp.up_proj", "down": ".mlp.down_proj",
    }  # fmt: skip
    for fused, parts in (("qkv", "qkv"), ("gate_up", ("gate", "up"))):
        if fused in roles:  # one tensor holds them
            usual = {role: name for role, name in usual.items() if role not in parts}
    names = {role: name for role, name in {**usual, **roles}.items() if name}
    return {role: layer + name if name.startswith(".") else name for role, name in names.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """What the shared blocks of decoders are built from. Defaults are those of a Llama."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    windows: tuple[int | None, ...]  # per layer: sliding window or None
    max_length: int
    norm_eps: float
    activation: str
    rope: Mapping[str, Any] | None  # None: no rotary positions
    window_rope: Mapping[str, Any] | None = None  # of the layers with a window, where theirs differ
    unturned: tuple[int, ...] = ()  # layers without rotary positions
    interleaved: bool = False  # rotary pairs are neighbours
    tie: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    head_bias: bool = False
    gated: bool = True  # down(act(gate) * up), else down(act(up))
    norm: NormKind = "rms"  # offset: the stored weight is 1 less; plain: no weight at all
    placement: Placement = "pre"  # of norms: before a block, after it, both; parallel: attention and MLP side by side
    qk_norm: Literal["", "head", "each", "whole"] = (
        ""  # of query and key heads, weights shared or for each; of all at once
    )
    qk_norm_last: bool = False  # after the rotation
    qkv_clip: float | None = None  # projections are limited to -clip..clip
    attn_scale: float | None = None  # None: 1 / sqrt(head_dim)
    attn_softcap: float | None = None
    sinks: bool = False
    alibi: bool = False
    embed_scale: float = 1.0
    embed_norm: bool = False
    num_positions: int = 0  # rows of a table of learned positions
    position_offset: int = 0  # row of position 0
    residual_scale: float = 1.0  # of what a block adds to the residual stream
    logit_scale: float = 1.0
    logit_softcap: float | None = None
    names: Mapping[str, str] = field(default_factory=tensor_names)  # role -> checkpoint module

    def __post_init__(self) -> None:
        if self.num_q_heads % self.num_kv_heads:
            raise UnsupportedModel("num_key_value_heads", self.num_kv_heads, f"a divisor of {self.num_q_heads}")
        if self.head_dim % 2:
            raise UnsupportedModel("head_dim", self.head_dim, "an even number")

    def need(self, layer: int) -> AttnNeed:
        """What attention in `layer` asks of a backend."""
        return AttnNeed(
            self.head_dim,
            self.num_q_heads,
            self.num_kv_heads,
            window=self.windows[layer],
            softcap=self.attn_softcap,
            sinks=self.sinks,
            alibi=self.alibi,
        )

    def layer_linears(self, i: int) -> list[LinearSpec]:
        """The quantizable linears of a layer, in order."""
        q, kv = self.num_q_heads * self.head_dim, self.num_kv_heads * self.head_dim
        d, m, to = self.hidden_size, self.intermediate_size, f"layers.{i}"

        def at(*roles: str) -> tuple[str, ...]:
            return tuple(self.names[role].format(i=i) for role in roles if role in self.names)

        specs = [
            LinearSpec(f"{to}.attn.qkv", d, (q, kv, kv), self.qkv_bias, "column", ("q", "k", "v"), at(*"qkv", "qkv")),
            LinearSpec(f"{to}.attn.o", q, (d,), self.o_bias, "row", (), at("o")),
        ]
        if self.gated:
            sources = at("gate", "up", "gate_up")
            specs += [LinearSpec(f"{to}.mlp.gate_up", d, (m, m), self.mlp_bias, "column", ("gate", "up"), sources)]
        else:
            specs += [LinearSpec(f"{to}.mlp.up", d, (m,), self.mlp_bias, "column", (), at("up"))]
        return [*specs, LinearSpec(f"{to}.mlp.down", m, (d,), self.mlp_bias, "row", (), at("down"))]

    def linears(self) -> tuple[LinearSpec, ...]:
        """Every quantizable linear, in order."""
        specs = [spec for i in range(len(self.windows)) for spec in self.layer_linears(i)]
        if not self.tie:
            specs.append(self.head())
        return tuple(specs)

    def head(self) -> LinearSpec:
        return LinearSpec(
            "lm_head", self.hidden_size, (self.vocab_size,), self.head_bias, sources=(self.names["lm_head"],)
        )

    def norms(self) -> list[int]:
        """Sizes of all norms."""
        per_layer = [self.hidden_size] * {"sandwich": 4, "parallel": 1}.get(self.placement, 2)
        if self.qk_norm == "head":
            per_layer += [self.head_dim] * 2
        elif self.qk_norm:
            per_layer += [self.num_q_heads * self.head_dim, self.num_kv_heads * self.head_dim]
        return per_layer * len(self.windows) + [self.hidden_size] * (1 + self.embed_norm)

    def num_parameters(self) -> int:
        linears = sum(s.total_out * (s.in_features + s.bias) for s in self.linears())
        linears += self.vocab_size if self.tie and self.head_bias else 0
        tables = (self.vocab_size + self.num_positions) * self.hidden_size
        sinks = self.num_q_heads * len(self.windows) if self.sinks else 0
        norms = sum(self.norms()) * NORM_TENSORS[self.norm]
        if self.qk_norm == "each" and self.norm == "layer":  # these have no bias
            norms -= (self.num_q_heads + self.num_kv_heads) * self.head_dim * len(self.windows)
        return linears + tables + sinks + norms


NORM_TENSORS: Mapping[NormKind, int] = {
    "rms": 1, "rms_offset": 1, "rms_plain": 0, "layer": 2, "layer_offset": 2, "layer_no_bias": 1, "layer_plain": 0,
}  # fmt: skip


def usual_config(r: ConfigReader, *, max_positions: Any = REQUIRED, **given: Any) -> DecoderConfig:
    """The configuration of a decoder whose keys are those of Llama; fields in `given` are not read.

    `max_positions` is the length where the file does not say it.
    """
    rope = given["rope"] if "rope" in given else r.rope()
    read: dict[str, Callable[[], Any]] = {
        "vocab_size": lambda: r.integer("vocab_size"),
        "hidden_size": lambda: r.integer("hidden_size"),
        "intermediate_size": lambda: r.integer("intermediate_size"),
        "num_q_heads": lambda: r.integer("num_attention_heads"),
        "num_kv_heads": lambda: r.integer("num_key_value_heads", r.integer("num_attention_heads")),
        "head_dim": lambda: r.integer("head_dim", r.integer("hidden_size") // r.integer("num_attention_heads")),
        "windows": lambda: (None,) * r.layers(),
        "max_length": lambda: rope_length(r.integer("max_position_embeddings", max_positions), rope),
        "norm_eps": lambda: r.number("rms_norm_eps", 1e-6),
        "activation": lambda: r.activation(),
        "rope": lambda: rope,
        "tie": lambda: r.flag("tie_word_embeddings", False),
    }
    return DecoderConfig(**{name: value() for name, value in read.items() if name not in given}, **given)


def decoder_info(architecture: str, reader: ConfigReader, cfg: DecoderConfig, extra_parameters: int = 0) -> ModelInfo:
    """The ModelInfo of a decoder; `info.config` holds `cfg` as plain values for `build`.

    `extra_parameters` is the number of those that a family adds to the shared blocks.
    """
    roles = ("q", "k", "v", "qkv", "o", "gate", "up", "gate_up", "down")
    targets = dict.fromkeys(cfg.names[role].rpartition(".")[2] for role in roles if role in cfg.names)
    if not cfg.gated:
        targets.pop(cfg.names.get("gate", "").rpartition(".")[2], None)
    return ModelInfo(
        architecture=architecture,
        vocab_size=cfg.vocab_size,
        hidden_size=cfg.hidden_size,
        layers=tuple(LayerInfo(i, cfg.need(i)) for i in range(len(cfg.windows))),
        max_length=cfg.max_length,
        dtype=reader.dtype(),
        num_parameters=cfg.num_parameters() + extra_parameters,
        eos_token_ids=reader.token_ids("eos_token_id"),
        bos_token_id=next(iter(reader.token_ids("bos_token_id")), None),
        tie_embeddings=cfg.tie,
        intermediate_size=cfg.intermediate_size,
        linears=cfg.linears(),
        adapter_targets=tuple(targets),
        config=asdict(cfg),
    )


def decoder_config(info: ModelInfo) -> DecoderConfig:
    """The DecoderConfig that `decoder_info` stored."""
    values: dict[str, Any] = dict(info.config)
    return DecoderConfig(**values | {name: tuple(values[name]) for name in ("windows", "unturned")})


TARGETS: Mapping[str, tuple[str, str | None]] = {  # role -> module of the model, part of it
    "embed": ("embed", None),
    "positions": ("positions", None),
    "embed_norm": ("embed_norm", None),
    "norm": ("norm", None),
    "attn_norm": ("layers.{i}.attn_norm", None),
    "attn_post_norm": ("layers.{i}.attn_post_norm", None),
    "mlp_norm": ("layers.{i}.mlp_norm", None),
    "mlp_post_norm": ("layers.{i}.mlp_post_norm", None),
    "q": ("layers.{i}.attn.qkv", "q"),
    "k": ("layers.{i}.attn.qkv", "k"),
    "v": ("layers.{i}.attn.qkv", "v"),
    "qkv": ("layers.{i}.attn.qkv", "*"),
    "o": ("layers.{i}.attn.o", None),
    "q_norm": ("layers.{i}.attn.q_norm", None),
    "k_norm": ("layers.{i}.attn.k_norm", None),
    "gate": ("layers.{i}.mlp.gate_up", "gate"),
    "up": ("layers.{i}.mlp.gate_up", "up"),
    "gate_up": ("layers.{i}.mlp.gate_up", "*"),
    "down": ("layers.{i}.mlp.down", None),
}


def decoder_weights(
    info: ModelInfo,
    transforms: Mapping[str, Callable[[Tensor], Tensor]] | None = None,
    targets: Mapping[str, str] | None = None,
) -> list[WeightRule]:
    """Where the tensors of a decoder go: `names` of its configuration, each tensor of a role through `transforms`.

    `targets` are the modules of roles that are a family's own.
    """
    cfg, transforms = decoder_config(info), transforms or {}
    where = {**TARGETS, **{role: (target, None) for role, target in (targets or {}).items()}}
    rules = []
    for role, source in cfg.names.items():
        if role not in where:
            continue
        target, part = where[role]
        if role == "up" and not cfg.gated:
            target, part = "layers.{i}.mlp.up", None
        if cfg.qk_norm == "each" and role in ("q_norm", "k_norm"):
            part, transform = ("{n}", one_row) if "{n}" in source else ("*", None)
            rules.append(WeightRule(f"{source}.weight", f"{target}.weight", part=part, transform=transform))
            continue
        if role.endswith("norm") and cfg.norm.endswith("offset"):
            rules.append(WeightRule(f"{source}.weight", f"{target}.weight", transform=one_more))
        rules.append(WeightRule(f"{source}.{{p}}", f"{target}.{{p}}", part=part, transform=transforms.get(role)))
    if cfg.sinks:
        rules.append(WeightRule(cfg.names["o"].rpartition(".")[0] + ".sinks", "layers.{i}.attn.attn.sinks"))
    head = cfg.names["lm_head"]
    if info.tie_embeddings:  # some files carry a second copy of the embedding
        rules.append(WeightRule(f"{head}.weight", "", ignore=True))
    rules.append(WeightRule(f"{head}.{{p}}", "lm_head.{p}"))
    rules.append(WeightRule(cfg.names["o"].rpartition(".")[0] + ".rotary_emb.inv_freq", "", ignore=True))
    return rules


def one_more(weight: Tensor) -> Tensor:
    """A norm's weight that is stored as its difference from 1, in float32: sums near 1 lose it in half precision."""
    return weight.float() + 1


def one_row(weight: Tensor) -> Tensor:
    """[D] -> [1, D]."""
    return weight[None]

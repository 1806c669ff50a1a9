"""A decoder as data, made from a checkpoint's configuration, and where its tensors come from. Torch-free."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from lmkit.api import (
    AttnNeed,
    LayerInfo,
    LinearSpec,
    ModelInfo,
    NormKind,
    Routing,
    StateTensor,
    UnsupportedModel,
    WeightRule,
)

from lmkit_decoders.reader import REQUIRED, ConfigReader, rope_length

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["ConfigReader", "DecoderConfig", "decoder_config", "decoder_info", "decoder_weights", "rope_length"]

Placement = Literal["pre", "post", "sandwich", "parallel", "parallel_two_norms", "alone"]


def tensor_names(layer: str = "model.layers.{i}", **roles: str) -> dict[str, str]:
    """Checkpoint module of each role: Llama's names, those of `roles` instead ("": there is none).

    A name with a leading dot is in a layer.
    """
    usual = {
        "embed": "model.embed_tokens", "norm": "model.norm", "lm_head": "lm_head",
        "attn_norm": ".input_layernorm", "mlp_norm": ".post_attention_layernorm",
        "q": ".self_attn.q_proj", "k": ".self_attn.k_proj", "v": ".self_attn.v_proj", "o": ".self_attn.o_proj",
        "q_norm": ".self_attn.q_norm", "k_norm": ".self_attn.k_norm", "sinks": ".self_attn.sinks",
        "gate": ".mlp.gate_proj", "up": ".mlp.up_proj", "down": ".mlp.down_proj",
    }  # fmt: skip
    for fused, parts in (("qkv", "qkv"), ("gate_up", ("gate", "up"))):
        if fused in roles:  # one tensor holds them
            usual = {role: name for role, name in usual.items() if role not in parts}
    names = {role: name for role, name in {**usual, **roles}.items() if name}
    return {role: layer + name if name.startswith(".") else name for role, name in names.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentConfig:
    """Multi-head latent attention: sizes of the latents, and of the parts of a head."""

    q_rank: int  # 0: queries are projected at once
    kv_rank: int
    plain: int  # of queries and keys, not turned
    turned: int
    value: int
    norm_eps: float = 1e-6  # of the latents

    def linears(self, cfg: DecoderConfig, i: int) -> list[LinearSpec]:
        d, heads, to, bias = cfg.hidden_size, cfg.num_q_heads, f"layers.{i}.attn", cfg.qkv_bias
        q, kv = heads * (self.plain + self.turned), heads * (self.plain + self.value)
        specs = [LinearSpec(f"{to}.q_b", d, (q,), False, "column", (), cfg.sources(i, "q"))]
        if self.q_rank:
            specs = [
                LinearSpec(f"{to}.q_a", d, (self.q_rank,), bias, "none", (), cfg.sources(i, "q_a")),
                LinearSpec(f"{to}.q_b", self.q_rank, (q,), False, "column", (), cfg.sources(i, "q_b")),
            ]
        return [
            *specs,
            LinearSpec(f"{to}.kv_a", d, (self.kv_rank + self.turned,), bias, "none", (), cfg.sources(i, "kv_a")),
            LinearSpec(f"{to}.kv_b", self.kv_rank, (kv,), False, "column", (), cfg.sources(i, "kv_b")),
            LinearSpec(f"{to}.o", heads * self.value, (d,), cfg.o_bias, "row", (), cfg.sources(i, "o")),
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class MoEConfig(Routing):
    """Mixtures of experts in a decoder's layers, and how their routers choose."""

    num_experts: int
    size: int  # intermediate size of one expert
    layers: tuple[bool, ...]  # which layers have experts; the others have an MLP
    activation: str = ""  # "": the decoder's
    correction: bool = False  # added to the scores for the choice
    router_bias: bool = False
    expert_bias: bool = False
    shared_size: int = 0  # intermediate size of the shared expert
    shared_gate: bool = False  # the shared expert's output is weighted by a sigmoid
    latent: int = 0  # size of what routed experts read and write, 0: the hidden size

    def linears(self, cfg: DecoderConfig, i: int) -> list[LinearSpec]:
        """The linears of layer `i`, experts stacked along the output axis."""
        d, m, e, to = self.latent or cfg.hidden_size, self.size, self.num_experts, f"layers.{i}.mlp"
        parts = tuple(f"{n}.{p}" for n in range(e) for p in (("gate", "up") if cfg.gated else ("up",)))
        into = cfg.sources(i, "expert_gate", "expert_up", "experts_gate", "experts_up")
        out = cfg.sources(i, "expert_down", "experts_down")
        bias = self.expert_bias
        specs = [
            LinearSpec(f"{to}.experts.up", d, (m,) * len(parts), bias, "column", parts, into, e),
            LinearSpec(f"{to}.experts.down", m, (d,) * e, bias, "row", tuple(map(str, range(e))), out, e),
        ]
        if self.shared_size:
            specs += cfg.mlp_linears(i, f"{to}.shared", self.shared_size, "shared_")
        if self.latent:
            for name, num_in, num_out in (("latent_in", cfg.hidden_size, d), ("latent_out", d, cfg.hidden_size)):
                source = cfg.sources(i, name)
                specs.append(LinearSpec(f"{to}.{name}", num_in, (num_out,), cfg.mlp_bias, "none", (), source))
        return specs

    def num_parameters(self, cfg: DecoderConfig) -> int:
        """Of all routers."""
        router = self.num_experts * (cfg.hidden_size + self.router_bias + self.correction)
        return sum(self.layers) * (router + cfg.hidden_size * self.shared_gate)


@dataclass(frozen=True, slots=True, kw_only=True)
class MixerConfig:
    """A block with recurrent state that some layers have instead of attention, or beside it."""

    layers: tuple[bool, ...]  # which have it
    state: tuple[StateTensor, ...]  # of one layer
    linears: tuple[LinearSpec, ...]  # of one layer; names are those in the block, sources are roles
    num_parameters: int  # of one layer beside its linears
    options: Mapping[str, Any]  # what the block is built from
    beside: bool = False  # these layers have attention too, and the block is its part "mixer"

    def path(self, i: int | str) -> str:
        """The block's module in layer `i`."""
        return f"layers.{i}.attn.mixer" if self.beside else f"layers.{i}.attn"

    def layer_linears(self, cfg: DecoderConfig, i: int) -> list[LinearSpec]:
        """The linears of layer `i`."""
        return [
            replace(spec, name=f"{self.path(i)}.{spec.name}", sources=cfg.sources(i, *spec.sources))
            for spec in self.linears
        ]


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
    chunked: bool = False  # windows are chunks (AttnNeed)
    interleaved: bool = False  # rotary pairs are neighbours
    tie: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    head_bias: bool = False
    gated: bool = True  # down(act(gate) * up), else down(act(up))
    norm: NormKind = "rms"  # offset: the stored weight is 1 less; plain: no weight at all
    placement: Placement = "pre"  # of norms: before a block, after it, both; parallel: beside the MLP; alone: no MLP
    mlp_only: tuple[int, ...] = ()  # layers that are an MLP alone, where the others have none
    qk_norm: Literal["", "head", "each", "whole"] = (
        ""  # of query and key heads, weights shared or for each; of all at once
    )
    qk_norm_last: bool = False  # after the rotation
    qkv_clip: float | None = None  # queries, keys and values are limited to -clip..clip, after norms
    attn_scale: float | None = None  # None: 1 / sqrt(head_dim)
    attn_softcap: float | None = None
    query_growth: tuple[float, float] | None = None  # (beta, length): see layers.attention.grow
    gated_attention: bool = False  # its output is multiplied by the sigmoid of another projection
    query_gate: bool = False  # such a gate stands beside each head in the projection of queries
    sinks: bool = False
    alibi: bool = False
    alibi_scale: float = 1.0  # what its slopes are multiplied by
    embed_scale: float = 1.0
    embed_norm: bool = False
    num_positions: int = 0  # rows of a table of learned positions
    position_offset: int = 0  # row of position 0
    residual_scale: float = 1.0  # of what a block adds to the residual stream
    logit_scale: float = 1.0
    logit_softcap: float | None = None
    moe: MoEConfig | None = None
    mla: LatentConfig | None = None  # head_dim is then that of queries and keys as a whole
    mixer: MixerConfig | None = None
    kv_of: int | None = None  # an earlier layer whose keys and values attention reads: it has none of its own
    k_is_v: bool = False  # no projection of values: they are the keys before norm and rotation
    per_layer: tuple[Mapping[str, Any], ...] = ()  # for each layer, fields that differ there; (): none do
    num_unused_layers: int = 0  # that files have after the last one, for drafts
    names: Mapping[str, str] = field(default_factory=tensor_names)  # role -> checkpoint module

    def __post_init__(self) -> None:
        if self.num_q_heads % self.num_kv_heads:
            raise UnsupportedModel("num_key_value_heads", self.num_kv_heads, f"a divisor of {self.num_q_heads}")
        if self.head_dim % 2:
            raise UnsupportedModel("head_dim", self.head_dim, "an even number")

    def at(self, layer: int) -> DecoderConfig:
        """The configuration that `layer` is built from."""
        return replace(self, **self.per_layer[layer], per_layer=()) if self.per_layer else self

    def need(self, layer: int) -> AttnNeed:
        """What attention in `layer` asks of a backend."""
        here = self.at(layer)
        return AttnNeed(
            here.head_dim,
            here.num_q_heads,
            here.num_kv_heads,
            v_head_dim=self.mla.value if self.mla else None,
            window=self.windows[layer],
            chunked=self.chunked and self.windows[layer] is not None,
            softcap=self.attn_softcap,
            sinks=self.sinks,
            alibi=self.alibi,
            alibi_scale=self.alibi_scale,
        )

    def mixes(self, layer: int) -> bool:
        """Whether `layer` has a mixer."""
        return self.mixer is not None and self.mixer.layers[layer]

    def attends(self, layer: int) -> bool:
        """Whether `layer` has attention."""
        if self.mixer is not None and self.mixer.layers[layer]:
            return self.mixer.beside
        return layer not in self.mlp_only

    def layer_info(self, i: int) -> LayerInfo:
        state = self.mixer.state if self.mixer is not None and self.mixes(i) else ()
        return LayerInfo(i, self.need(i) if self.attends(i) else None, state, self.at(i).kv_of)

    def sparse(self, layer: int) -> bool:
        """Whether `layer` has experts."""
        return self.moe is not None and self.moe.layers[layer]

    def sources(self, i: int, *roles: str) -> tuple[str, ...]:
        """Checkpoint modules of those roles that there are; of the first expert, where each has one."""
        return tuple(self.names[role].format(i=i, e=0) for role in roles if role in self.names)

    @property
    def rotary_dim(self) -> int:
        """Size of the part of a head that rotary positions are made for."""
        return self.mla.turned if self.mla else self.head_dim

    def attention_linears(self, i: int) -> list[LinearSpec]:
        """Of what stands where attention stands."""
        mixer = self.mixer.layer_linears(self, i) if self.mixer is not None and self.mixes(i) else []
        if not self.attends(i):
            return mixer
        if self.mla is not None:
            return self.mla.linears(self, i)
        q, kv = self.num_q_heads * self.head_dim, self.num_kv_heads * self.head_dim
        sizes = {"q": q * (1 + self.query_gate)}
        if self.kv_of is None:
            sizes |= {"k": kv} if self.k_is_v else {"k": kv, "v": kv}
        d, to, into = self.hidden_size, f"layers.{i}.attn", self.sources(i, *sizes, "qkv")
        specs = [
            LinearSpec(f"{to}.qkv", d, tuple(sizes.values()), self.qkv_bias, "column", tuple(sizes), into),
            LinearSpec(f"{to}.o", q, (d,), self.o_bias, "row", (), self.sources(i, "o")),
        ]
        if self.gated_attention:
            specs.append(LinearSpec(f"{to}.gate", d, (q,), False, "column", (), self.sources(i, "attn_gate")))
        return specs + mixer

    def mlp_linears(self, i: int, to: str, m: int, role: str = "") -> list[LinearSpec]:
        """Of an MLP with intermediate size `m` at module `to`; `role` precedes the names of its roles."""
        d, bias = self.hidden_size, self.mlp_bias
        down = LinearSpec(f"{to}.down", m, (d,), bias, "row", (), self.sources(i, f"{role}down"))
        if not self.gated:
            return [LinearSpec(f"{to}.up", d, (m,), bias, "column", (), self.sources(i, f"{role}up")), down]
        into = self.sources(i, f"{role}gate", f"{role}up", f"{role}gate_up")
        return [LinearSpec(f"{to}.gate_up", d, (m, m), bias, "column", ("gate", "up"), into), down]

    def layer_linears(self, i: int) -> list[LinearSpec]:
        """The quantizable linears of a layer, in order."""
        here = self.at(i)
        specs = here.attention_linears(i)
        if self.placement == "alone" and i not in self.mlp_only:
            return specs
        if self.moe is not None and self.moe.layers[i]:
            return specs + self.moe.linears(here, i)
        return specs + here.mlp_linears(i, f"layers.{i}.mlp", here.intermediate_size)

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
        per_layer = [self.hidden_size] * {"sandwich": 4, "parallel": 1, "alone": 1}.get(self.placement, 2)
        norms = per_layer * len(self.windows) + [self.hidden_size] * (1 + self.embed_norm)
        attends = filter(self.attends, range(len(self.windows)))
        return norms + [size for i in attends for size in self.at(i).attention_norms()]

    def attention_norms(self) -> list[int]:
        """Sizes of the norms in a layer's attention."""
        if self.mla is not None:
            return [self.mla.q_rank, self.mla.kv_rank]
        if not self.qk_norm:
            return []
        q, k = (1, 1) if self.qk_norm == "head" else (self.num_q_heads, self.num_kv_heads)
        return [self.head_dim * heads for heads in ((q, k) if self.kv_of is None else (q,))]

    def num_parameters(self) -> int:
        linears = sum(s.total_out * (s.in_features + s.bias) for s in self.linears())
        linears += self.vocab_size if self.tie and self.head_bias else 0
        tables = (self.vocab_size + self.num_positions) * self.hidden_size
        sinks = self.num_q_heads * len(self.windows) if self.sinks else 0
        norms = sum(self.norms()) * NORM_TENSORS[self.norm]
        if self.qk_norm == "each" and self.norm == "layer":  # these have no bias
            norms -= (self.num_q_heads + self.num_kv_heads) * self.head_dim * len(self.windows)
        mixers = self.mixer.num_parameters * sum(self.mixer.layers) if self.mixer else 0
        return linears + tables + sinks + norms + mixers + (self.moe.num_parameters(self) if self.moe else 0)


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
        "max_length": lambda: r.length(rope_length(r.integer("max_position_embeddings", max_positions), rope)),
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
    roles: tuple[str, ...] = ("q", "k", "v", "qkv", "q_a", "q_b", "kv_a", "kv_b", "o", "gate", "up", "gate_up", "down")
    roles += tuple(f"{kind}_{part}" for kind in ("expert", "shared") for part in ("gate", "up", "down", "gate_up"))
    roles += ("mamba_in", "mamba_x", "mamba_dt", "mamba_out", "conv_in", "conv_out")
    targets = dict.fromkeys(cfg.names[role].rpartition(".")[2] for role in roles if role in cfg.names)
    if not cfg.gated:
        targets.pop(cfg.names.get("gate", "").rpartition(".")[2], None)
    embedding = "" if cfg.tie else cfg.names["embed"]  # an adapter of one tied module would mean two things
    if embedding:
        targets |= dict.fromkeys(name.rpartition(".")[2] for name in (embedding, cfg.names["lm_head"]))
    return ModelInfo(
        architecture=architecture,
        vocab_size=cfg.vocab_size,
        hidden_size=cfg.hidden_size,
        layers=tuple(cfg.layer_info(i) for i in range(len(cfg.windows))),
        max_length=cfg.max_length,
        dtype=reader.dtype(),
        num_parameters=cfg.num_parameters() + extra_parameters,
        eos_token_ids=reader.token_ids("eos_token_id"),
        bos_token_id=next(iter(reader.token_ids("bos_token_id")), None),
        tie_embeddings=cfg.tie,
        intermediate_size=max(cfg.intermediate_size, cfg.moe.size * cfg.moe.top_k if cfg.moe else 0),
        linears=cfg.linears(),
        adapter_targets=tuple(targets),
        embedding=embedding,
        config=asdict(cfg),
    )


def decoder_config(info: ModelInfo) -> DecoderConfig:
    """The DecoderConfig that `decoder_info` stored."""
    values: dict[str, Any] = {name: value for name, value in info.config.items() if name != "options"}
    values |= {name: tuple(values[name]) for name in ("windows", "unturned", "mlp_only", "per_layer")}
    if values["moe"] is not None:
        values["moe"] = MoEConfig(**values["moe"] | {"layers": tuple(values["moe"]["layers"])})
    if values["mla"] is not None:
        values["mla"] = LatentConfig(**values["mla"])
    if values["mixer"] is not None:
        mixer = values["mixer"]
        state = tuple(StateTensor(**tensor) for tensor in mixer["state"])
        linears = tuple(LinearSpec(**spec) for spec in mixer["linears"])
        values["mixer"] = MixerConfig(**mixer | {"layers": tuple(mixer["layers"]), "state": state, "linears": linears})
    return DecoderConfig(**values)


Target = str | tuple[str, str]  # module of the model ("{mixer}.conv": in the mixer); and part of it
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
    "attn_gate": ("layers.{i}.attn.gate", None),
    "q_a": ("layers.{i}.attn.q_a", None),
    "q_a_norm": ("layers.{i}.attn.q_a_norm", None),
    "q_b": ("layers.{i}.attn.q_b", None),
    "kv_a": ("layers.{i}.attn.kv_a", None),
    "kv_a_norm": ("layers.{i}.attn.kv_a_norm", None),
    "kv_b": ("layers.{i}.attn.kv_b", None),
    "q_norm": ("layers.{i}.attn.q_norm", None),
    "k_norm": ("layers.{i}.attn.k_norm", None),
    "gate": ("layers.{i}.mlp.gate_up", "gate"),
    "up": ("layers.{i}.mlp.gate_up", "up"),
    "gate_up": ("layers.{i}.mlp.gate_up", "*"),
    "down": ("layers.{i}.mlp.down", None),
    "router": ("layers.{i}.mlp.router", None),
    "expert_gate": ("layers.{i}.mlp.experts.up", "{e}.gate"),
    "expert_up": ("layers.{i}.mlp.experts.up", "{e}.up"),
    "expert_down": ("layers.{i}.mlp.experts.down", "{e}"),
    "shared_gate": ("layers.{i}.mlp.shared.gate_up", "gate"),
    "shared_up": ("layers.{i}.mlp.shared.gate_up", "up"),
    "shared_gate_up": ("layers.{i}.mlp.shared.gate_up", "*"),
    "shared_down": ("layers.{i}.mlp.shared.down", None),
    "latent_in": ("layers.{i}.mlp.latent_in", None),
    "latent_out": ("layers.{i}.mlp.latent_out", None),
}
TENSORS: Mapping[str, tuple[str, str | None]] = {  # the same for roles that are single tensors
    "correction": ("layers.{i}.mlp.router.correction", None),
    "shared_weight": ("layers.{i}.mlp.shared_gate", None),
    "experts_gate": ("layers.{i}.mlp.experts.up.weight", "*.gate"),  # "experts_up" then holds the rest only
    "experts_up": ("layers.{i}.mlp.experts.up.weight", "*"),
    "experts_up_bias": ("layers.{i}.mlp.experts.up.bias", "*"),
    "experts_down": ("layers.{i}.mlp.experts.down.weight", "*"),
    "experts_down_bias": ("layers.{i}.mlp.experts.down.bias", "*"),
    "sinks": ("layers.{i}.attn.attn.sinks", None),
    "mamba_A": ("{mixer}.A", None),
    "mamba_D": ("{mixer}.D", None),
    "mamba_dt_bias": ("{mixer}.dt_bias", None),
}


def decoder_weights(
    info: ModelInfo,
    transforms: Mapping[str, Callable[[Tensor], Tensor]] | None = None,
    targets: Mapping[str, Target] | None = None,
) -> list[WeightRule]:
    """Where the tensors of a decoder go: `names` of its configuration, each tensor of a role through `transforms`.

    `targets` are the modules, and parts, of roles that are a family's own.
    """
    cfg, transforms = decoder_config(info), transforms or {}
    where = {**TARGETS, **{role: (t, None) if isinstance(t, str) else t for role, t in (targets or {}).items()}}
    layer = next(name for name in cfg.names.values() if "{i}" in name).partition("{i}")[0]
    twice = [source for source, num in Counter(cfg.names.values()).items() if num > 1]
    unused = range(len(cfg.windows), len(cfg.windows) + cfg.num_unused_layers)
    rules = [WeightRule(f"{layer}{i}.{{any}}", "", ignore=True) for i in unused]
    mixer = cfg.mixer.path("{i}") if cfg.mixer else ""
    for i in range(len(cfg.windows)):
        if cfg.at(i).kv_of is not None:  # some files have them nevertheless
            kv = [cfg.names[role].format(i=i) for role in ("k", "v", "k_norm", "v_norm") if role in cfg.names]
            rules += [WeightRule(f"{source}.{{p}}", "", ignore=True) for source in kv]
    for role in sorted(TENSORS.keys() & cfg.names.keys()):
        target, part = TENSORS[role]
        target = target.replace("{mixer}", mixer)
        if role == "experts_up" and "experts_gate" in cfg.names:
            part = "*.up"
        rules.append(WeightRule(cfg.names[role], target, part=part, transform=transforms.get(role)))
    for role, source in cfg.names.items():
        if role not in where:
            continue
        target, part = where[role]
        target = target.replace("{mixer}", mixer)
        if role == "q" and cfg.mla is not None:
            target, part = "layers.{i}.attn.q_b", None
        if role in ("up", "shared_up") and not cfg.gated:
            target, part = target.replace("gate_up", "up"), None
        if cfg.qk_norm == "each" and role in ("q_norm", "k_norm"):
            part, transform = ("{n}", one_row) if "{n}" in source else ("*", None)
            rules.append(WeightRule(f"{source}.weight", f"{target}.weight", part=part, transform=transform))
            continue
        if cfg.mixer is not None and source in twice and where[role][0].startswith("{mixer}"):
            # called as in layers of another kind: the layers of this one are named, and come first
            at = [str(i) for i, mixes in enumerate(cfg.mixer.layers) if mixes]
            pairs = [(f"{source}.{{p}}".replace("{i}", i), f"{target}.{{p}}".replace("{i}", i)) for i in at]
            rules[:0] = [WeightRule(*pair, part=part, transform=transforms.get(role)) for pair in pairs]
            continue
        if role.endswith("norm") and cfg.norm.endswith("offset"):
            rules.append(WeightRule(f"{source}.weight", f"{target}.weight", transform=one_more))
        rules.append(WeightRule(f"{source}.{{p}}", f"{target}.{{p}}", part=part, transform=transforms.get(role)))
    head = cfg.names["lm_head"]
    if info.tie_embeddings:  # some files carry a second copy of the embedding, or have another head nevertheless
        rules.append(WeightRule(f"{head}.weight", "lm_head.weight", ignore=True))
    rules.append(WeightRule(f"{head}.{{p}}", "lm_head.{p}"))
    if "o" in cfg.names:
        rules.append(WeightRule(cfg.names["o"].rpartition(".")[0] + ".rotary_emb.inv_freq", "", ignore=True))
    return rules


def one_more(weight: Tensor) -> Tensor:
    """A norm's weight that is stored as its difference from 1, in float32: sums near 1 lose it in half precision."""
    return weight.float() + 1


def one_row(weight: Tensor) -> Tensor:
    """[D] -> [1, D]."""
    return weight[None]

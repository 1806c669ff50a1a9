"""A decoder as data, made from a checkpoint's configuration. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Literal

from lmkit.api import (
    AttnNeed,
    LayerInfo,
    LinearSpec,
    ModelInfo,
    NormKind,
    Routing,
    StateTensor,
    UnsupportedModel,
)

from lmkit_decoders.places import HeadNorms, OffsetNorm, OneTensor, Place, mlp_places
from lmkit_decoders.reader import REQUIRED, ConfigReader, rope_length

# How a layer is put together: with a norm before each of its two blocks, after it, or both; with the MLP beside what
# mixes tokens, behind one norm or two; with one block alone.
Wiring = Literal["pre", "post", "sandwich", "parallel", "parallel_two_norms", "alone"]


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
            LinearSpec(f"{to}.kv_b", self.kv_rank, (kv,), False, "column", (), cfg.sources(i, "kv_b"), dense=True),
            LinearSpec(f"{to}.o", heads * self.value, (d,), cfg.o_bias, "row", (), cfg.sources(i, "o")),
        ]

    def places(self) -> dict[str, Place]:
        """Where its tensors go."""
        to, own = "layers.{i}.attn", ("q_a", "q_a_norm", "q_b", "kv_a", "kv_a_norm", "kv_b", "o")
        return {"q": Place(f"{to}.q_b"), **{name: Place(f"{to}.{name}") for name in own}}


@dataclass(frozen=True, slots=True, kw_only=True)
class MoEConfig(Routing):
    """Mixtures of experts in a decoder's layers, and how their routers choose."""

    num_experts: int
    size: int  # intermediate size of one expert
    layers: tuple[bool, ...]  # which layers have experts; the others have an MLP
    activation: str = ""  # "": the decoder's
    correction: bool = False  # added to the scores for the choice
    shared_size: int = 0  # intermediate size of the shared expert

    def check(self) -> None:
        """Raises UnsupportedModel for choices that no router can make."""
        if self.top_k > self.num_experts:
            raise UnsupportedModel("num_experts_per_tok", self.top_k, f"at most the {self.num_experts} experts")
        if self.num_experts % self.num_groups:
            raise UnsupportedModel("n_group", self.num_groups, f"a divisor of the {self.num_experts} experts")
        share = self.num_experts // self.num_groups
        if self.top_groups > self.num_groups:
            raise UnsupportedModel("topk_group", self.top_groups, f"at most the {self.num_groups} groups")
        if self.top_k > share * self.top_groups:
            allowed = f"at most {share * self.top_groups}: the experts of {self.top_groups} groups"
            raise UnsupportedModel("num_experts_per_tok", self.top_k, allowed)
        if self.num_groups > 1 and self.group_score == "two best" and share < 2:
            raise UnsupportedModel("n_group", self.num_groups, "groups of at least two experts")

    def linears(self, cfg: DecoderConfig, i: int) -> list[LinearSpec]:
        """The linears of layer `i`, experts stacked along the output axis."""
        d, m, e, to = cfg.hidden_size, self.size, self.num_experts, f"layers.{i}.mlp"
        parts = tuple(f"{n}.{p}" for n in range(e) for p in (("gate", "up") if cfg.gated else ("up",)))
        into = cfg.sources(i, "expert_gate", "expert_up", "experts_gate", "experts_up")
        out = cfg.sources(i, "expert_down", "experts_down")
        specs = [
            LinearSpec(f"{to}.experts.up", d, (m,) * len(parts), False, "column", parts, into, e),
            LinearSpec(f"{to}.experts.down", m, (d,) * e, False, "row", tuple(map(str, range(e))), out, e),
        ]
        if self.shared_size:
            specs += cfg.mlp_linears(i, f"{to}.shared", self.shared_size, "shared_")
        return specs

    def num_parameters(self, cfg: DecoderConfig) -> int:
        """The number of parameters of all routers."""
        return sum(self.layers) * self.num_experts * (cfg.hidden_size + self.correction)

    def places(self, cfg: DecoderConfig) -> dict[str, Place]:
        """Where its tensors go; "experts_up" holds gates too, unless there are "experts_gate"."""
        mlp, up = "layers.{i}.mlp", "layers.{i}.mlp.experts.up"
        return mlp_places(f"{mlp}.shared", cfg.gated, "shared_") | {
            "router": Place(f"{mlp}.router"),
            "correction": OneTensor(f"{mlp}.router.correction"),
            "expert_gate": Place(up, "{e}.gate"),
            "expert_up": Place(up, "{e}.up"),
            "expert_down": Place(f"{mlp}.experts.down", "{e}"),
            "experts_gate": OneTensor(f"{up}.weight", "*.gate"),
            "experts_up": OneTensor(f"{up}.weight", "*.up" if "experts_gate" in cfg.names else "*"),
            "experts_down": OneTensor(f"{mlp}.experts.down.weight", "*"),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class MixerConfig:
    """A block with recurrent state that some layers have instead of attention."""

    layers: tuple[bool, ...]  # which have it
    state: tuple[StateTensor, ...]  # of one layer
    linears: tuple[LinearSpec, ...]  # of one layer; names are those in the block, sources are roles
    num_parameters: int  # of one layer beside its linears
    options: Mapping[str, Any]  # what the block is built from

    def layer_linears(self, cfg: DecoderConfig, i: int) -> list[LinearSpec]:
        """The linears of layer `i`."""
        return [
            replace(spec, name=f"{cfg.mixer_path(i)}.{spec.name}", sources=cfg.sources(i, *spec.sources))
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
    interleaved: bool = False  # rotary pairs are neighbours
    tie: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    head_bias: bool = False
    gated: bool = True  # down(act(gate) * up), else down(act(up))
    norm: NormKind = "rms"  # offset: the stored weight is 1 less; plain: no weight at all
    wiring: Wiring = "pre"  # of its layers
    # what a norm of queries and keys is taken over: nothing, each head with the same weights or its own, all heads
    qk_norm: Literal["", "head", "each", "whole"] = ""
    qk_norm_last: bool = False  # it follows the rotation
    qkv_clip: float | None = None  # queries, keys and values are limited to -clip..clip, after norms
    attn_scale: float | None = None  # None: 1 / sqrt(head_dim)
    query_growth: tuple[float, float] | None = None  # (beta, length): see layers.attention.grow
    sinks: bool = False
    alibi: bool = False
    embed_scale: float = 1.0
    embed_norm: bool = False
    num_positions: int = 0  # rows of a table of learned positions
    residual_scale: float = 1.0  # of what a block adds to the residual stream
    logit_scale: float = 1.0
    logit_softcap: float | None = None
    moe: MoEConfig | None = None
    mla: LatentConfig | None = None  # heads are then those of queries and keys as they are projected
    mixer: MixerConfig | None = None
    per_layer: tuple[Mapping[str, Any], ...] = ()  # for each layer, fields that differ there; (): none do
    num_unused_layers: int = 0  # that files have after the last one, for drafts
    length_note: str = ""  # see ModelInfo
    names: Mapping[str, str] = field(default_factory=tensor_names)  # role -> checkpoint module

    def __post_init__(self) -> None:
        if self.num_q_heads % self.num_kv_heads:
            raise UnsupportedModel("num_key_value_heads", self.num_kv_heads, f"a divisor of {self.num_q_heads}")
        if self.head_dim % 2:
            raise UnsupportedModel("head_dim", self.head_dim, "an even number")
        if self.moe is not None:
            self.moe.check()
        if self.mixer is not None and (wrong := [s for s in self.mixer.state if not all(n > 0 for n in s.shape)]):
            raise UnsupportedModel(
                f"{wrong[0].name} state", list(wrong[0].shape), "sizes from 1: kernels from 2 tokens"
            )

    def at(self, layer: int) -> DecoderConfig:
        """The configuration that `layer` is built from."""
        return replace(self, **self.per_layer[layer], per_layer=()) if self.per_layer else self

    def need(self, layer: int) -> AttnNeed:
        """What attention in `layer` asks of a backend."""
        here, mla = self.at(layer), self.mla
        return AttnNeed(
            mla.kv_rank + mla.turned if mla else here.head_dim,
            here.num_q_heads,
            1 if mla else here.num_kv_heads,
            mla=mla is not None,
            v_head_dim=mla.kv_rank if mla else None,
            window=self.windows[layer],
            sinks=self.sinks,
            alibi=self.alibi,
        )

    def mixes(self, layer: int) -> bool:
        """Whether `layer` has a mixer."""
        return self.mixer is not None and self.mixer.layers[layer]

    def mixer_path(self, i: int | str) -> str:
        """The mixer's module in layer `i`."""
        return f"layers.{i}.attn"

    def attends(self, layer: int) -> bool:
        """Whether `layer` has attention."""
        return not self.mixes(layer)

    def has_mlp(self, layer: int) -> bool:
        """Whether `layer` has an MLP, or experts."""
        return self.wiring != "alone"

    def layer_info(self, i: int) -> LayerInfo:
        """What a backend and the cache must know of layer `i`."""
        state = self.mixer.state if self.mixer is not None and self.mixes(i) else ()
        return LayerInfo(i, self.need(i) if self.attends(i) else None, state)

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
        """The linears of what stands where attention stands: itself, a mixer, or both."""
        mixer = self.mixer.layer_linears(self, i) if self.mixer is not None and self.mixes(i) else []
        if not self.attends(i):
            return mixer
        if self.mla is not None:
            return self.mla.linears(self, i)
        d, sizes, to = self.hidden_size, self.head_sizes(), f"layers.{i}.attn"
        into, q = self.sources(i, *sizes, "qkv"), self.num_q_heads * self.head_dim
        return [
            LinearSpec(f"{to}.qkv", d, tuple(sizes.values()), self.qkv_bias, "column", tuple(sizes), into),
            LinearSpec(f"{to}.o", q, (d,), self.o_bias, "row", (), self.sources(i, "o")),
            *mixer,
        ]

    def head_sizes(self) -> dict[str, int]:
        """Sizes of the parts of the projection that attention begins with: roles of tensors, in order."""
        kv = self.num_kv_heads * self.head_dim
        return {"q": self.num_q_heads * self.head_dim, "k": kv, "v": kv}

    def mlp_linears(self, i: int, to: str, m: int, role: str = "") -> list[LinearSpec]:
        """The linears of an MLP with intermediate size `m` at module `to`; `role` precedes the names of its roles."""
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
        if not self.has_mlp(i):
            return specs
        if self.sparse(i):
            return specs + here.expert_linears(i)
        return specs + here.mlp_linears(i, f"layers.{i}.mlp", here.intermediate_size)

    def expert_linears(self, i: int) -> list[LinearSpec]:
        """The linears of the mixture of experts in layer `i`."""
        assert self.moe is not None
        return self.moe.linears(self, i)

    def linears(self) -> tuple[LinearSpec, ...]:
        """Every quantizable linear, in order."""
        specs = [spec for i in range(len(self.windows)) for spec in self.layer_linears(i)]
        if not self.tie:
            specs.append(self.head())
        return tuple(specs)

    def head(self) -> LinearSpec:
        sources = (self.names["lm_head"],)
        return LinearSpec("lm_head", self.hidden_size, (self.vocab_size,), self.head_bias, "column", sources=sources)

    def places(self) -> dict[str, Place]:
        """Where the tensors of each role go. A family's own roles are its architecture's `targets`."""
        norm = OffsetNorm if self.norm.endswith("offset") else Place
        plain = {"embed": "embed", "positions": "positions"}
        norms = {"norm": "norm", "embed_norm": "embed_norm"}
        norms |= {role: f"layers.{{i}}.{role}" for role in ("attn_norm", "attn_post_norm", "mlp_norm", "mlp_post_norm")}
        found = {role: Place(path) for role, path in plain.items()} | {role: norm(path) for role, path in norms.items()}
        found |= self.mla.places() if self.mla else self.attention_places(norm)
        found |= mlp_places("layers.{i}.mlp", self.gated)
        return found | self.moe.places(self) if self.moe else found

    def attention_places(self, norm: type[Place]) -> dict[str, Place]:
        """Where attention's tensors go; `norm` is the place of norms."""
        to, norm = "layers.{i}.attn", HeadNorms if self.qk_norm == "each" else norm
        return {
            **{part: Place(f"{to}.qkv", part) for part in "qkv"},
            "qkv": Place(f"{to}.qkv", "*"),
            "o": Place(f"{to}.o"),
            "attn_gate": Place(f"{to}.gate"),
            "q_norm": norm(f"{to}.q_norm"),
            "k_norm": norm(f"{to}.k_norm"),
            "sinks": OneTensor(f"{to}.attn.sinks"),
        }

    def norms(self) -> list[int]:
        """Sizes of all norms."""
        per_layer = [self.hidden_size] * {"sandwich": 4, "parallel": 1, "alone": 1}.get(self.wiring, 2)
        norms = per_layer * len(self.windows) + [self.hidden_size] * (1 + self.embed_norm)
        attends = filter(self.attends, range(len(self.windows)))
        return norms + [size for i in attends for size in self.at(i).attention_norms()]

    def attention_norms(self) -> list[int]:
        """Sizes of the norms in a layer's attention."""
        if self.mla is not None:
            return [self.mla.q_rank, self.mla.kv_rank]
        if not self.qk_norm:
            return []
        heads = (1, 1) if self.qk_norm == "head" else (self.num_q_heads, self.num_kv_heads)
        return [self.head_dim * num for num in heads]

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


def usual_config(
    r: ConfigReader, *, max_positions: Any = REQUIRED, kind: type[DecoderConfig] | None = None, **given: Any
) -> DecoderConfig:
    """The configuration of a decoder whose keys are those of Llama; fields in `given` are not read.

    `max_positions` is the length where the file does not say it, `kind` the class where it is the family's own.
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
    return (kind or DecoderConfig)(**{name: value() for name, value in read.items() if name not in given}, **given)


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
        length_note=cfg.length_note or _chunk_note(reader, cfg.max_length),
    )


def _chunk_note(reader: ConfigReader, length: int) -> str:
    """Why ConfigReader.length may be less than all positions; "" where it is not."""
    positions = reader.config.get("max_position_embeddings")
    if not reader.config.get("dual_chunk_attention_config") or not isinstance(positions, int) or length >= positions:
        return ""
    return "dual chunk attention is not implemented beyond the first chunk, where it equals plain attention"


def decoder_config(info: ModelInfo, kind: type[DecoderConfig] | None = None) -> DecoderConfig:
    """The DecoderConfig that `decoder_info` stored, as one of class `kind`: fields of another class are left out."""
    kind = kind or DecoderConfig
    stored = {f.name: info.config[f.name] for f in fields(kind) if f.name in info.config}
    values: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in stored.items()}
    if values["moe"] is not None:
        values["moe"] = MoEConfig(**values["moe"] | {"layers": tuple(values["moe"]["layers"])})
    if values["mla"] is not None:
        values["mla"] = LatentConfig(**values["mla"])
    if values["mixer"] is not None:
        mixer = values["mixer"]
        state = tuple(StateTensor(**tensor) for tensor in mixer["state"])
        linears = tuple(LinearSpec(**spec) for spec in mixer["linears"])
        values["mixer"] = MixerConfig(**mixer | {"layers": tuple(mixer["layers"]), "state": state, "linears": linears})
    return kind(**values)

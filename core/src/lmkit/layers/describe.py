"""Reading a checkpoint's configuration strictly, and the data of a decoder made from it. Torch-free.

Only keys that an architecture reads matter: a key it does not know cannot change what the architecture computes.
Each value read is checked against what the code here understands; anything else raises UnsupportedModel.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from lmkit.api import AttnNeed, LayerInfo, LinearSpec, ModelInfo, UnsupportedModel, WeightRule, canonical

REQUIRED: Any = object()
MAX_LAYERS = 10_000

# rope_type -> (required numbers, optional numbers)
ROPE_TYPES: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "default": ((), ()),
    "linear": (("factor",), ()),
    "dynamic": (("factor",), ()),
    "yarn": (
        ("factor",),
        (
            "original_max_position_embeddings",
            "attention_factor",
            "beta_fast",
            "beta_slow",
            "mscale",
            "mscale_all_dim",
            "truncate",
        ),
    ),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"), ()),
}


class ConfigReader:
    """Typed access to config.json. A missing key without default, or a value of another type, is an error."""

    def __init__(self, config: Mapping[str, object]) -> None:
        self.config = config

    def _get(self, key: str, default: Any) -> Any:
        value = self.config.get(key)
        if value is not None:
            return value
        if default is REQUIRED:
            raise UnsupportedModel(key, None, "a value is required")
        return default

    def integer(self, key: str, default: Any = REQUIRED, maximum: int = 1 << 31) -> int:
        """An integer from 1 to `maximum` (what a file says is not trusted to be sane)."""
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= maximum:
            raise UnsupportedModel(key, value, f"an integer from 1 to {maximum}")
        return value

    def count(self, key: str, default: Any = REQUIRED) -> int:
        """An integer from 0 on."""
        return 0 if self._get(key, default) == 0 else self.integer(key, default)

    def layers(self, key: str = "num_hidden_layers") -> int:
        return self.integer(key, maximum=MAX_LAYERS)

    def number(self, key: str, default: Any = REQUIRED) -> float:
        """A positive, finite number."""
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise UnsupportedModel(key, value, "a positive number")
        return float(value)

    def flag(self, key: str, default: Any = REQUIRED) -> bool:
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise UnsupportedModel(key, value, "true or false")
        return value

    def one_of(self, key: str, allowed: Iterable[object], default: Any = REQUIRED) -> Any:
        """A value among `allowed`; None is allowed when listed."""
        allowed = list(allowed)
        value = self.config.get(key) if None in allowed and default is REQUIRED else self._get(key, default)
        if value not in allowed:
            raise UnsupportedModel(key, value, ", ".join(map(repr, allowed)))
        return value

    def token_ids(self, key: str) -> tuple[int, ...]:
        """An id, a list of ids, or nothing."""
        value = self.config.get(key)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if any(isinstance(i, bool) or not isinstance(i, int) or i < 0 for i in ids):
            raise UnsupportedModel(key, value, "token ids")
        return tuple(ids)

    def dtype(self) -> str:
        """The checkpoint's dtype ("dtype" in newer files, "torch_dtype" in older); float32 when it says nothing."""
        value = self.config.get("dtype") or self.config.get("torch_dtype") or "float32"
        name = canonical(str(value))
        if name not in ("float32", "float16", "bfloat16"):
            raise UnsupportedModel("dtype", value, "float32, float16, bfloat16")
        return name

    def architecture(self, known: Iterable[str]) -> str:
        names = self.config.get("architectures")
        known = tuple(known)
        if not isinstance(names, list) or len(names) != 1 or names[0] not in known:
            raise UnsupportedModel("architectures", names, ", ".join(known))
        return str(names[0])

    def rope(self, default_theta: float = 10000.0) -> dict[str, Any]:
        """Rotary parameters: {"rope_type", "theta", "partial", ...numbers of the type}.

        Newer files have `rope_parameters`, older ones `rope_theta` beside an optional `rope_scaling`.
        """
        key = "rope_parameters" if self.config.get("rope_parameters") is not None else "rope_scaling"
        raw = self.config.get(key) or {}
        if not isinstance(raw, Mapping) or any(isinstance(v, Mapping) for v in raw.values()):
            raise UnsupportedModel(key, raw, "one set of rotary parameters for all layers")
        kind = raw.get("rope_type", raw.get("type", "default"))
        if kind not in ROPE_TYPES:
            raise UnsupportedModel(f"{key}.rope_type", kind, ", ".join(ROPE_TYPES))
        required, optional = ROPE_TYPES[kind]
        numbers = ConfigReader(raw)
        theta = numbers.number("rope_theta", self.config.get("rope_theta") or default_theta)
        partial = numbers.number("partial_rotary_factor", self.config.get("partial_rotary_factor") or 1.0)
        if partial > 1:
            raise UnsupportedModel("partial_rotary_factor", partial, "at most 1")
        rope: dict[str, Any] = {"rope_type": kind, "theta": theta, "partial": partial}
        for name in required:
            rope[name] = numbers.number(name)
        for name in optional:
            if raw.get(name) is not None:
                rope[name] = numbers.flag(name) if name == "truncate" else numbers.number(name)
        unknown = set(raw) - {*required, *optional, "rope_type", "type", "rope_theta", "partial_rotary_factor"}
        # Unknown keys are legal only where transformers writes them for every type.
        unknown -= {"original_max_position_embeddings"} if kind in ("default", "linear", "dynamic") else set()
        if unknown:
            name = sorted(unknown)[0]
            raise UnsupportedModel(f"{key}.{name}", raw[name], f"keys of rope_type {kind!r}")
        if kind == "yarn" and "original_max_position_embeddings" not in rope:
            rope["original_max_position_embeddings"] = self.integer("max_position_embeddings")
        return rope


def rope_length(positions: int, rope: Mapping[str, Any]) -> int:
    """Positions a model serves whose configuration says `positions`: a YaRN factor extends the original length."""
    if rope["rope_type"] != "yarn":
        return positions
    return max(positions, round(rope["factor"] * rope["original_max_position_embeddings"]))


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """A pre-norm decoder with rotary attention and a gated MLP: what the shared blocks are built from."""

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
    rope: Mapping[str, Any]
    tie: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False  # RMS norm of each query and key head before the rotation

    def __post_init__(self) -> None:
        if self.num_q_heads % self.num_kv_heads:
            raise UnsupportedModel("num_key_value_heads", self.num_kv_heads, f"a divisor of {self.num_q_heads}")
        if self.head_dim % 2:
            raise UnsupportedModel("head_dim", self.head_dim, "an even number")

    def linears(self) -> tuple[LinearSpec, ...]:
        """Every quantizable linear, in order."""
        q, kv = self.num_q_heads * self.head_dim, self.num_kv_heads * self.head_dim
        d, m = self.hidden_size, self.intermediate_size
        specs = []
        for i in range(len(self.windows)):
            to, src = f"layers.{i}", f"model.layers.{i}"
            qkv = tuple(f"{src}.self_attn.{p}_proj" for p in "qkv")
            gate_up = (f"{src}.mlp.gate_proj", f"{src}.mlp.up_proj")
            specs += [
                LinearSpec(f"{to}.attn.qkv", d, (q, kv, kv), self.qkv_bias, "column", ("q", "k", "v"), qkv),
                LinearSpec(f"{to}.attn.o", q, (d,), self.o_bias, "row", (), (f"{src}.self_attn.o_proj",)),
                LinearSpec(f"{to}.mlp.gate_up", d, (m, m), self.mlp_bias, "column", ("gate", "up"), gate_up),
                LinearSpec(f"{to}.mlp.down", m, (d,), self.mlp_bias, "row", (), (f"{src}.mlp.down_proj",)),
            ]
        if not self.tie:
            specs.append(LinearSpec("lm_head", d, (self.vocab_size,), sources=("lm_head",)))
        return tuple(specs)

    def num_parameters(self) -> int:
        linears = sum(s.total_out * (s.in_features + s.bias) for s in self.linears())
        per_layer_norms = 2 * self.hidden_size + (2 * self.head_dim if self.qk_norm else 0)
        return linears + self.vocab_size * self.hidden_size + self.hidden_size + len(self.windows) * per_layer_norms


def decoder_info(architecture: str, reader: ConfigReader, cfg: DecoderConfig) -> ModelInfo:
    """The ModelInfo of a decoder; `info.config` holds `cfg` as plain values for `build`."""
    layers = tuple(
        LayerInfo(i, AttnNeed(cfg.head_dim, cfg.num_q_heads, cfg.num_kv_heads, window=window))
        for i, window in enumerate(cfg.windows)
    )
    return ModelInfo(
        architecture=architecture,
        vocab_size=cfg.vocab_size,
        hidden_size=cfg.hidden_size,
        layers=layers,
        max_length=cfg.max_length,
        dtype=reader.dtype(),
        num_parameters=cfg.num_parameters(),
        eos_token_ids=reader.token_ids("eos_token_id"),
        bos_token_id=next(iter(reader.token_ids("bos_token_id")), None),
        tie_embeddings=cfg.tie,
        intermediate_size=cfg.intermediate_size,
        linears=cfg.linears(),
        adapter_targets=("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
        config=asdict(cfg),
    )


def decoder_config(info: ModelInfo) -> DecoderConfig:
    """The DecoderConfig that `decoder_info` stored."""
    return DecoderConfig(**dict(info.config, windows=tuple(info.config["windows"])))  # type: ignore[arg-type]


def decoder_weights(info: ModelInfo) -> list[WeightRule]:
    """Where the tensors of a decoder checkpoint with the usual names go."""
    src, to = "model.layers.{i}", "layers.{i}"
    rules = [
        WeightRule("model.embed_tokens.weight", "embed.weight"),
        *(WeightRule(f"{src}.self_attn.{p}_proj.{{p}}", f"{to}.attn.qkv.{{p}}", part=p) for p in "qkv"),
        WeightRule(f"{src}.self_attn.o_proj.{{p}}", f"{to}.attn.o.{{p}}"),
        WeightRule(f"{src}.mlp.gate_proj.{{p}}", f"{to}.mlp.gate_up.{{p}}", part="gate"),
        WeightRule(f"{src}.mlp.up_proj.{{p}}", f"{to}.mlp.gate_up.{{p}}", part="up"),
        WeightRule(f"{src}.mlp.down_proj.{{p}}", f"{to}.mlp.down.{{p}}"),
        WeightRule(f"{src}.input_layernorm.weight", f"{to}.attn_norm.weight"),
        WeightRule(f"{src}.post_attention_layernorm.weight", f"{to}.mlp_norm.weight"),
        WeightRule("model.norm.weight", "norm.weight"),
        WeightRule(f"{src}.self_attn.rotary_emb.inv_freq", "", ignore=True),
    ]
    if info.tie_embeddings:  # some files carry a second copy of the embedding
        rules.append(WeightRule("lm_head.weight", "", ignore=True))
    else:
        rules.append(WeightRule("lm_head.{p}", "lm_head.{p}"))
    return rules

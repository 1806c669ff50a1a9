"""An encoder as data: what BERT, its descendants with rotary positions, and ModernBERT have in common. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lmkit.api import AttnNeed, LayerInfo, LinearSpec, ModelInfo, PoolerInfo, UnsupportedModel
from lmkit_decoders.describe import ConfigReader


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderConfig:
    """Bidirectional attention and an MLP per layer, each with a layer norm before (`pre_norm`) or after it."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    windows: tuple[int | None, ...]  # per layer: how far attention reaches on each side, itself included
    max_length: int
    norm_eps: float
    activation: str
    num_positions: int = 0  # learned position embeddings; 0: rotary
    first_position: int = 0  # RoBERTa counts from pad_token_id + 1
    ropes: tuple[Mapping[str, Any], ...] = ()  # of full and of windowed layers
    num_types: int = 0  # token types
    qkv_bias: bool = True
    o_bias: bool = True
    mlp_bias: tuple[bool, bool] = (True, True)  # up, down
    gated: bool = False
    fused_qkv: bool = False  # the checkpoint stores q, k, v as one tensor
    fused_up: bool = False  # and gate, up
    pre_norm: bool = False
    norm_bias: bool = True
    head: tuple[LinearSpec, ...] = ()  # of classification: one linear, or two with an activation between
    head_activation: str = "tanh"
    head_norm: bool = False  # a layer norm after that activation
    prefixes: tuple[str, ...] = ("",)  # before the names of the layers in the checkpoint

    def __post_init__(self) -> None:
        if self.hidden_size % self.num_heads or self.hidden_size // self.num_heads % 2:
            raise UnsupportedModel("num_attention_heads", self.num_heads, f"an even share of {self.hidden_size}")

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    def linears(self) -> tuple[LinearSpec, ...]:
        d, m, specs = self.hidden_size, self.intermediate_size, []
        qkv = ((3 * d,), ()) if self.fused_qkv else ((d, d, d), ("q", "k", "v"))
        up = ((m,), ()) if not self.gated else ((2 * m,), ()) if self.fused_up else ((m, m), ("gate", "up"))
        for i in range(len(self.windows)):
            specs += [
                LinearSpec(f"layers.{i}.qkv", d, qkv[0], self.qkv_bias, parts=qkv[1]),
                LinearSpec(f"layers.{i}.o", d, (d,), self.o_bias),
                LinearSpec(f"layers.{i}.up", d, up[0], self.mlp_bias[0], parts=up[1]),
                LinearSpec(f"layers.{i}.down", m, (d,), self.mlp_bias[1]),
            ]
        return tuple(specs)

    def num_parameters(self) -> int:
        d, norm = self.hidden_size, self.hidden_size * (1 + self.norm_bias)
        linears = sum(s.total_out * (s.in_features + s.bias) for s in (*self.linears(), *self.head))
        norms = 1 + 2 * len(self.windows) + self.head_norm  # pre-norm: the first layer has one less, the end one more
        return linears + d * (self.vocab_size + self.num_positions + self.num_types) + norm * norms


def encoder_info(name: str, reader: ConfigReader, cfg: EncoderConfig, pooler: PoolerInfo) -> ModelInfo:
    """The ModelInfo of an encoder; `info.config["encoder"]` holds `cfg` for `build`."""
    heads = cfg.num_heads
    needs = [AttnNeed(cfg.head_dim, heads, heads, window=window, causal=False) for window in cfg.windows]
    return ModelInfo(
        architecture=name,
        vocab_size=cfg.vocab_size,
        hidden_size=cfg.hidden_size,
        layers=tuple(LayerInfo(i, need) for i, need in enumerate(needs)),
        max_length=cfg.max_length,
        dtype=reader.dtype(),
        num_parameters=cfg.num_parameters(),
        intermediate_size=cfg.intermediate_size * (1 + cfg.gated) // 2,
        linears=cfg.linears(),
        pooler=pooler,
        config={"encoder": cfg},
    )

"""BitNet (weights that have been unpacked): what is code and not data."""

from __future__ import annotations

from typing import Any

from lmkit_decoders import Decoder, GatedMLP, SelfAttention
from lmkit_layers.norm import norm_over_ranks
from torch import Tensor


def normed(norm: Any, y: Tensor, ranks: Any) -> Tensor:
    """The norm over the rows [T, D] of all ranks, in place."""
    norm_over_ranks(norm, y[:, None], ranks.size if ranks is not None else 1, ranks)
    return y


class BitNetAttention(SelfAttention):
    """A norm before the output projection."""

    def __init__(self, cfg: Any, layer: int, specs: Any, ctx: Any) -> None:
        super().__init__(cfg, layer, specs, ctx)
        self.sub_norm, self.ranks = ctx.norm(cfg.hidden_size, cfg.norm_eps), ctx.collectives

    def output(self, y: Tensor, h: Tensor) -> Tensor:
        return self.o(normed(self.sub_norm, y, self.ranks))


class BitNetMLP(GatedMLP):
    """A norm before the down projection."""

    def __init__(self, cfg: Any, layer: int, specs: Any, ctx: Any) -> None:
        super().__init__(cfg, layer, specs, ctx)
        self.sub_norm, self.ranks = ctx.norm(cfg.intermediate_size, cfg.norm_eps), ctx.collectives

    def forward(self, h: Tensor) -> Tensor:
        return self.down(normed(self.sub_norm, self.rows.gate(self.gate_up(h), self.act), self.ranks))


class BitNet(Decoder):
    attention = BitNetAttention
    gated_mlp = BitNetMLP

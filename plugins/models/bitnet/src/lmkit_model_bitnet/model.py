"""BitNet (weights that have been unpacked): what is code and not data."""

from __future__ import annotations

from typing import Any

from lmkit_decoders import Decoder, GatedMLP, SelfAttention
from torch import Tensor


class BitNetAttention(SelfAttention):
    """A norm before the output projection."""

    def __init__(self, cfg: Any, layer: int, specs: Any, ctx: Any) -> None:
        super().__init__(cfg, layer, specs, ctx)
        self.sub_norm = ctx.norm(cfg.hidden_size, cfg.norm_eps)

    def output(self, y: Tensor, h: Tensor) -> Tensor:
        return self.o(self.sub_norm(y))


class BitNetMLP(GatedMLP):
    """A norm before the down projection."""

    def __init__(self, cfg: Any, layer: int, specs: Any, ctx: Any) -> None:
        super().__init__(cfg, layer, specs, ctx)
        self.sub_norm = ctx.norm(cfg.intermediate_size, cfg.norm_eps)

    def forward(self, h: Tensor) -> Tensor:
        return self.down(self.sub_norm(self.rows.gate(self.gate_up(h), self.act)))


class BitNet(Decoder):
    attention = BitNetAttention
    gated_mlp = BitNetMLP

"""AFMoE: what attention says is multiplied by the sigmoid of another projection."""

from __future__ import annotations

from typing import Any

from lmkit_decoders import Decoder, SelfAttention
from torch import Tensor


class GatedAttention(SelfAttention):
    def __init__(self, cfg: Any, layer: int, specs: Any, ctx: Any) -> None:
        super().__init__(cfg, layer, specs, ctx)
        self.gate = ctx.linear(specs[f"layers.{layer}.attn.gate"])

    def output(self, y: Tensor, h: Tensor) -> Tensor:
        return self.o(y * self.gate(h).sigmoid())


class Afmoe(Decoder):
    attention = GatedAttention

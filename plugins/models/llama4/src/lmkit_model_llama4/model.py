"""Llama 4: norms of turned heads, the temperature of full layers, and experts whose input is scaled."""

from __future__ import annotations

from typing import Any

import torch
from lmkit.api import StepInputs
from lmkit_decoders import Decoder, MoE, SelfAttention
from lmkit_decoders.decoder import Angles
from torch import Tensor


class Llama4Attention(SelfAttention):
    def __init__(self, cfg: Any, layer: int, specs: Any, ctx: Any) -> None:
        super().__init__(cfg, layer, specs, ctx)
        options = ctx.info.config["options"]
        self.scale, self.floor = options["scale"], options["floor"]
        self.head_norm = ctx.norm(cfg.head_dim, cfg.norm_eps, "rms_plain") if options["normed"] else None

    def heads(self, h: Tensor, angles: Angles | None, x: StepInputs) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = super().heads(h, angles, x)
        if angles is None:
            growth = torch.log1p(((x.positions + 1) / self.floor).floor()) * self.scale + 1
            q = (q * growth[:, None, None]).to(q.dtype)
        elif self.head_norm is not None:
            q, k = self.head_norm(q), self.head_norm(k)
        return q, k, v


class Llama4Experts(MoE):
    def forward(self, h: Tensor) -> Tensor:
        assert self.shared is not None
        ids, weights = self.router(h)
        return self.experts(h * weights, ids, torch.ones_like(weights)).add_(self.shared(h))


class Llama4(Decoder):
    attention = Llama4Attention
    moe = Llama4Experts

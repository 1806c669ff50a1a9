"""Apertus: what is code and not data."""

from __future__ import annotations

from typing import Any

import torch
from lmkit_decoders import MLP, Decoder
from torch import Tensor, nn
from torch.nn import functional as F


class Xielu(MLP):
    """xIELU, whose two slopes are learned: https://arxiv.org/abs/2411.13010."""

    def __init__(self, cfg: Any, layer: int, specs: Any, ctx: Any) -> None:
        super().__init__(cfg, layer, specs, ctx)
        self.alpha_p = nn.Parameter(torch.empty(1, dtype=ctx.dtype), requires_grad=False)
        self.alpha_n = nn.Parameter(torch.empty(1, dtype=ctx.dtype), requires_grad=False)

    def activate(self, x: Tensor) -> Tensor:
        positive, negative = F.softplus(self.alpha_p), 0.5 + F.softplus(self.alpha_n)
        low = torch.expm1(x.clamp(max=-1e-6)) - x
        return torch.where(x > 0, positive * x * x, negative * low) + 0.5 * x


class Apertus(Decoder):
    plain_mlp = Xielu

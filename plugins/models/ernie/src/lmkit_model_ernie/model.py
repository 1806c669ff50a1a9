"""ERNIE 4.5 with experts: the sum by which the weights of the chosen are divided is not less than a limit."""

from __future__ import annotations

from typing import Any

from lmkit_decoders import Decoder, MoE
from lmkit_layers import Router
from torch import Tensor

from lmkit_model_ernie.arch import NEGLIGIBLE


class LimitedRouter(Router):
    norm_min = 0.0

    def forward(self, h: Tensor) -> tuple[Tensor, Tensor]:
        ids, weights = super().forward(h)
        weights = weights.float()
        return ids, (weights / weights.sum(-1, keepdim=True).clamp(min=self.norm_min)).to(h.dtype)


class ErnieExperts(MoE):
    router: LimitedRouter
    router_class = LimitedRouter

    def __init__(self, cfg: Any, path: str, specs: Any, ctx: Any) -> None:
        least = ctx.info.config["options"]["norm_min"]
        if least <= NEGLIGIBLE:  # the usual rule, which is one operator
            self.router_class = Router
        super().__init__(cfg, path, specs, ctx)
        self.router.norm_min = least


class ErnieMoE(Decoder):
    moe = ErnieExperts

"""Command models with experts: the one thing that is code and not data."""

from __future__ import annotations

from typing import Any

from lmkit_decoders import Decoder, MoE
from torch import Tensor


class CohereExperts(MoE):
    """Routed experts and the shared one are averaged, where the file says so."""

    def __init__(self, cfg: Any, path: str, specs: Any, ctx: Any) -> None:
        super().__init__(cfg, path, specs, ctx)
        self.share = 0.5 if ctx.info.config["options"]["average"] else 1.0

    def forward(self, h: Tensor) -> Tensor:
        return super().forward(h).mul_(self.share)


class Cohere2Moe(Decoder):
    moe = CohereExperts

"""Medusa heads as a module."""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

import torch
from lmkit.api import BuildContext, ModelInfo, StepInputs
from torch import Tensor, nn
from torch.nn import functional as F


class MedusaHeads(nn.Module):
    """Hidden states of the model [S, D] -> logits of the tokens after the next [S, heads, V]."""

    def __init__(self, info: ModelInfo, ctx: BuildContext) -> None:
        super().__init__()
        specs = {spec.name: spec for spec in info.linears}
        num_heads, num_layers = int(str(info.config["heads"])), int(str(info.config["layers"]))
        self.heads = nn.ModuleList(
            nn.ModuleList(ctx.linear(specs[f"heads.{head}.{i}"]) for i in range(num_layers + 1))
            for head in range(num_heads)
        )

    def forward(self, x: StepInputs) -> Tensor:
        assert x.embeds is not None
        return x.embeds

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        found = []
        for head in self.heads:
            *blocks, last = cast("Iterable[nn.Module]", head)
            h = hidden
            for block in blocks:
                h = h + F.silu(block(h))
            found.append(last(h))
        return torch.stack(found, 1)

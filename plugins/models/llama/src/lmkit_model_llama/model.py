"""Ministral 3: the one thing that is code and not data."""

from __future__ import annotations

from typing import Any

import torch
from lmkit.api import StepInputs
from lmkit.layers import Decoder, SelfAttention
from lmkit.layers.decoder import Angles
from torch import Tensor


class Ministral3Attention(SelfAttention):
    """Queries grow with the logarithm of their position, so that long contexts stay in focus."""

    def __init__(self, cfg: Any, *rest: Any) -> None:
        super().__init__(cfg, *rest)
        self.beta, self.length = cfg.rope["llama_4_scaling_beta"], cfg.rope["original_max_position_embeddings"]

    def heads(self, h: Tensor, angles: Angles | None, x: StepInputs) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = super().heads(h, angles, x)
        q *= (1 + self.beta * torch.log1p(x.positions // self.length)).to(q.dtype)[:, None, None]
        return q, k, v


class Ministral3(Decoder):
    attention = Ministral3Attention

"""Qwen3-Next and Qwen3.5: gated delta nets, and attention whose queries bring a gate for its output."""

from __future__ import annotations

from typing import Any

import torch
from lmkit.api import StepInputs
from lmkit_decoders import Decoder, GatedDeltaNet, MoE, SelfAttention
from lmkit_decoders.decoder import Angles
from torch import Tensor, nn


class GatedAttention(SelfAttention):
    def forward(self, h: Tensor, angles: Angles | None, x: StepInputs) -> Tensor:
        projected = self.qkv(h).view(h.shape[0], -1, self.head_dim)
        queries, kv = projected.split((2 * self.num_q, 2 * self.num_kv), dim=1)
        q, gate = queries.unflatten(1, (self.num_q, 2)).unbind(2)
        q, k, v = self.prepare(torch.cat((q, kv), dim=1), angles, x)
        return self.o(self.attn(q, k, v, x) * gate.flatten(1).sigmoid())


class GatedMoE(MoE):
    """What the shared expert says is weighted by the sigmoid of a projection to one number."""

    def __init__(self, cfg: Any, path: str, specs: Any, ctx: Any) -> None:
        super().__init__(cfg, path, specs, ctx)
        gate = torch.empty(1, cfg.hidden_size, dtype=ctx.dtype)
        self.shared_gate = nn.Parameter(gate, requires_grad=False)


class Qwen2Moe(Decoder):
    moe = GatedMoE


class Hybrid(Qwen2Moe):
    attention = GatedAttention
    mixer = GatedDeltaNet

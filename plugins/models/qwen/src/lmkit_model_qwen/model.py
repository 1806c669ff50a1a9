"""Qwen3-Next and Qwen3.5: gated delta nets, and attention whose queries bring a gate for its output."""

from __future__ import annotations

import torch
from lmkit.api import StepInputs
from lmkit_decoders import Decoder, GatedDeltaNet, SelfAttention
from lmkit_decoders.decoder import Angles
from torch import Tensor


class GatedAttention(SelfAttention):
    def forward(self, h: Tensor, angles: Angles | None, x: StepInputs) -> Tensor:
        projected = self.qkv(h).view(h.shape[0], -1, self.head_dim)
        queries, kv = projected.split((2 * self.num_q, 2 * self.num_kv), dim=1)
        q, gate = queries.unflatten(1, (self.num_q, 2)).unbind(2)
        q, k, v = self.prepare(torch.cat((q, kv), dim=1), angles, x)
        return self.o(self.attn(q, k, v, x) * gate.flatten(1).sigmoid())


class Hybrid(Decoder):
    attention = GatedAttention
    mixer = GatedDeltaNet

"""Phi-MoE: two experts, one after the other, each against those that come near it (https://arxiv.org/abs/2409.12136)."""

from __future__ import annotations

import torch
from lmkit_decoders import Decoder, MoE
from lmkit_layers import Router
from torch import Tensor
from torch.nn import functional as F


class SparseMixer(Router):
    """An expert whose logit is further than twice the jitter from the best one's, relatively, has no share."""

    def forward(self, h: Tensor) -> tuple[Tensor, Tensor]:
        left = logits = F.linear(h, self.weight, self.bias).float()
        ids, weights = [], []
        for _ in range(2):
            best, chosen = left.max(-1, keepdim=True)
            far = (best - logits) / torch.maximum(logits.abs(), best) > 2 * self.routing.epsilon
            share = left.masked_fill(far, -torch.inf).softmax(-1)
            ids.append(chosen)
            weights.append(share.gather(1, chosen))
            left = left.scatter(1, chosen, -torch.inf)
        return torch.cat(ids, 1), torch.cat(weights, 1).to(h.dtype)


class PhiExperts(MoE):
    router_class = SparseMixer


class PhiMoE(Decoder):
    moe = PhiExperts

"""Kimi delta attention: a gated delta net whose state forgets channel by channel."""

from __future__ import annotations

from typing import Any, cast

import torch
from lmkit.api import StepInputs
from lmkit_decoders import Conv1d, Decoder, gated_delta_rule
from lmkit_layers import Norm
from torch import Tensor, nn
from torch.nn import functional as F


class DeltaAttention(nn.Module):
    """hidden [T, D] -> [T, D]. How much is forgotten, and the gate of what comes out, pass through narrow layers."""

    def __init__(self, cfg: Any, layer: int, specs: Any, ctx: Any) -> None:
        super().__init__()
        given, self.layer, path = cfg.mixer.options, layer, cfg.mixer_path(layer)
        self.heads, self.head_dim = given["heads"], given["head_dim"]
        size = self.heads * self.head_dim
        self.qkv, self.low, self.f, self.g, self.o = (
            ctx.linear(specs[f"{path}.{name}"]) for name in ("qkv", "low", "f", "g", "o")
        )
        self.conv = Conv1d(3 * size, given["width"], ctx, parts=dict.fromkeys("qkv", size))
        self.A_log = nn.Parameter(torch.empty(self.heads, dtype=torch.float32), requires_grad=False)
        self.dt_bias = nn.Parameter(torch.empty(size, dtype=torch.float32), requires_grad=False)
        self.norm = cast("Norm", ctx.norm(self.head_dim, cfg.norm_eps))

    def forward(self, h: Tensor, angles: object, x: StepInputs) -> Tensor:
        assert x.state is not None
        state = x.state.tensors[self.layer]
        qkv = F.silu(self.conv(self.qkv(h), state["conv"], x)).unflatten(1, (3, self.heads, self.head_dim))
        f, g, b = self.low(h).split((self.head_dim, self.head_dim, self.heads), dim=1)
        forgotten = F.softplus(self.f(f.contiguous()).float() + self.dt_bias).unflatten(1, (self.heads, -1))
        decay = -self.A_log.exp()[:, None] * forgotten
        y = gated_delta_rule(*qkv.unbind(1), decay, b.float().sigmoid(), state["delta"], x.state)
        return self.o(self.norm(y).flatten(1) * self.g(g.contiguous()).sigmoid())


class KimiLinearModel(Decoder):
    mixer = DeltaAttention

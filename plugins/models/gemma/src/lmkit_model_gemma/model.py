"""RecurrentGemma: real-gated linear recurrent units (https://arxiv.org/abs/2402.19427)."""

from __future__ import annotations

from typing import Any

import torch
from lmkit.api import StepInputs
from lmkit_decoders import Conv1d, Decoder, rg_lru
from lmkit_decoders.decoder import Angles
from torch import Tensor, nn
from torch.nn import functional as F


class RecurrentBlock(nn.Module):
    """hidden [T, D] -> [T, D]: a convolution and a recurrent unit, times a gate."""

    def __init__(self, cfg: Any, layer: int, specs: Any, ctx: Any) -> None:
        super().__init__()
        width, taps, heads = cfg.mixer.options["width"], cfg.mixer.options["taps"], cfg.num_q_heads
        self.layer, self.act, self.rows = layer, cfg.activation, ctx.rows
        self.xy, self.o = (ctx.linear(specs[f"layers.{layer}.attn.{name}"]) for name in ("xy", "o"))
        self.conv = Conv1d(width, taps, ctx, bias=True)
        for name in ("input", "recurrent"):
            weight = torch.empty(heads, width // heads, width // heads, dtype=ctx.dtype)
            bias = torch.empty(heads, width // heads, dtype=ctx.dtype)
            self.register_parameter(f"{name}_gate_weight", nn.Parameter(weight, requires_grad=False))
            self.register_parameter(f"{name}_gate_bias", nn.Parameter(bias, requires_grad=False))
        self.recurrent_param = nn.Parameter(torch.empty(width, dtype=ctx.dtype), requires_grad=False)

    def forward(self, h: Tensor, angles: Angles | None, x: StepInputs) -> Tensor:
        assert x.state is not None
        state = x.state.tensors[self.layer]
        u, y = self.xy(h).chunk(2, dim=-1)
        u = self.conv(u, state["conv"], x)
        forget = self.opened("recurrent", u) * F.softplus(self.recurrent_param)
        u = rg_lru(u, self.opened("input", u), -8 * forget, state["lru"], x.state, x.positions)
        return self.o(u * self.rows.activate(y, self.act))

    def opened(self, gate: str, u: Tensor) -> Tensor:
        """How far a gate is open [T, W]: each head reads its own part of u."""
        weight, bias = self.get_parameter(f"{gate}_gate_weight"), self.get_parameter(f"{gate}_gate_bias")
        by_head = u.unflatten(1, (len(weight), -1)).transpose(0, 1)
        return torch.baddbmm(bias[:, None], by_head, weight).sigmoid().transpose(0, 1).flatten(1)


class RecurrentGemma(Decoder):
    mixer = RecurrentBlock

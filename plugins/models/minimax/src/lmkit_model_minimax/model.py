"""MiniMax-Text-01: lightning attention, and layers whose residual stream is what the norms give."""

from __future__ import annotations

from typing import Any, cast

import torch
from lmkit.api import StepInputs
from lmkit_decoders import Decoder, DecoderLayer, lightning_attention
from lmkit_decoders.decoder import Angles
from lmkit_layers import Norm
from torch import Tensor, nn


class LightningAttention(nn.Module):
    """hidden [T, D] -> [T, D]; each head forgets at a rate of its own, later layers more slowly."""

    decay: Tensor

    def __init__(self, cfg: Any, layer: int, specs: Any, ctx: Any) -> None:
        super().__init__()
        self.layer, self.heads, self.act, self.rows = layer, cfg.num_q_heads, cfg.activation, ctx.rows
        self.qkv, self.gate, self.o = (ctx.linear(specs[f"layers.{layer}.attn.{p}"]) for p in ("qkv", "gate", "o"))
        self.norm = cast("Norm", ctx.norm(cfg.num_q_heads * cfg.head_dim, 1e-6))
        head = torch.arange(1, self.heads + 1, device="cpu")
        slower = 1 - layer / (len(cfg.windows) - 1 + 1e-5) + 1e-5
        self.register_buffer("decay", -(2 ** (-8 * head / self.heads)) * slower, persistent=False)

    def forward(self, h: Tensor, angles: Angles | None, x: StepInputs) -> Tensor:
        assert x.state is not None
        q, k, v = self.rows.activate(self.qkv(h), self.act).unflatten(1, (3, self.heads, -1)).unbind(1)
        y = lightning_attention(q, k, v, self.decay, x.state.tensors[self.layer]["kv"], x.state)
        return self.o(self.norm(y.flatten(1)) * self.gate(h).sigmoid())


class MiniMaxLayer(DecoderLayer):
    """What goes on is a weighted sum of a block's output and its input, which is normed already."""

    attn_shares: tuple[float, float]
    mlp_shares: tuple[float, float]

    def mix(self, h: Tensor, delta: Tensor | None, angles: Angles | None, x: StepInputs) -> tuple[Tensor, ...]:
        y = self.attn_norm.add(h, delta)
        kept, added = self.attn_shares
        return h, y * kept + self.attn(y, angles, x) * added

    def finish(self, h: Tensor, mixed: Tensor) -> Tensor:
        y = self.mlp_norm(mixed)
        kept, added = self.mlp_shares
        h.copy_(y * kept)
        return self.mlp(y) * added


class MiniMax(Decoder):
    mixer = LightningAttention

    def make_layer(self, i: int, specs: Any, ctx: Any) -> DecoderLayer:
        layer = MiniMaxLayer(self.cfg, self.make_attention(i, specs, ctx), self.make_mlp(i, specs, ctx), ctx)
        shares = ctx.info.config["options"]
        layer.attn_shares, layer.mlp_shares = shares["linear" if self.cfg.mixes(i) else "full"], shares["mlp"]
        return layer

"""The encoder of EncoderConfig in torch."""

from __future__ import annotations

from typing import cast

import torch
from lmkit.api import BuildContext, LinearSpec, ModelInfo, StepInputs
from lmkit_layers import activation
from torch import Tensor, nn

from lmkit_model_bert.describe import EncoderConfig

Angles = tuple[Tensor, Tensor]


def layer_norm(cfg: EncoderConfig, ctx: BuildContext) -> nn.LayerNorm:
    return nn.LayerNorm(cfg.hidden_size, cfg.norm_eps, bias=cfg.norm_bias, dtype=ctx.dtype).requires_grad_(False)


class Layer(nn.Module):
    """Attention and MLP around residuals: [T, D] -> [T, D]."""

    def __init__(self, cfg: EncoderConfig, i: int, specs: dict[str, LinearSpec], ctx: BuildContext) -> None:
        super().__init__()
        self.qkv, self.o, self.up, self.down = (
            ctx.linear(specs[f"layers.{i}.{n}"]) for n in ("qkv", "o", "up", "down")
        )
        self.attn = ctx.attention(i, scale=cfg.head_dim**-0.5)
        first = cfg.pre_norm and i == 0  # the embedding was normed just before
        self.attn_norm = nn.Identity() if first else layer_norm(cfg, ctx)
        self.mlp_norm = layer_norm(cfg, ctx)
        self.act = activation(cfg.activation)
        self.cfg, self.rows = cfg, ctx.rows

    def forward(self, h: Tensor, angles: Angles | None, x: StepInputs) -> Tensor:
        if self.cfg.pre_norm:
            h = h + self.attend(self.attn_norm(h), angles, x)
            return h + self.mlp(self.mlp_norm(h))
        h = self.attn_norm(h + self.attend(h, angles, x))
        return self.mlp_norm(h + self.mlp(h))

    def attend(self, h: Tensor, angles: Angles | None, x: StepInputs) -> Tensor:
        heads = self.cfg.num_heads
        qkv = self.qkv(h).view(h.shape[0], 3 * heads, self.cfg.head_dim)
        qk, v = qkv.split((2 * heads, heads), dim=1)
        if angles is not None:
            self.rows.rotate(qk, *angles)
        q, k = qk.split(heads, dim=1)
        return self.o(self.attn(q, k, v, x))

    def mlp(self, h: Tensor) -> Tensor:
        up = self.up(h)
        return self.down(self.rows.gate(up, self.cfg.activation) if self.cfg.gated else self.act(up))


class Encoder(nn.Module):
    """Embeddings, layers, head: a complete Model."""

    def __init__(self, info: ModelInfo, ctx: BuildContext) -> None:
        super().__init__()
        cfg = self.cfg = cast("EncoderConfig", info.config["encoder"])
        specs = {spec.name: spec for spec in info.linears}
        self.tokens = ctx.embedding(cfg.vocab_size, cfg.hidden_size)
        self.positions = ctx.embedding(cfg.num_positions, cfg.hidden_size) if cfg.num_positions else None
        self.types = ctx.embedding(cfg.num_types, cfg.hidden_size) if cfg.num_types else None
        self.norm = layer_norm(cfg, ctx)
        self.rotaries = nn.ModuleList(ctx.rotary(cfg.head_dim, rope) for rope in cfg.ropes)
        self.layers = nn.ModuleList(Layer(cfg, i, specs, ctx) for i in range(len(cfg.windows)))
        self.final_norm = layer_norm(cfg, ctx) if cfg.pre_norm else nn.Identity()
        self.head = nn.ModuleList(ctx.linear(spec) for spec in cfg.head)
        self.head_norm = layer_norm(cfg, ctx) if cfg.head_norm else nn.Identity()
        self.head_act = torch.tanh if cfg.head_activation == "tanh" else activation(cfg.head_activation)

    @torch.inference_mode()
    def forward(self, x: StepInputs) -> Tensor:
        h = self.tokens(x.token_ids)
        if self.types is not None:
            h = h + self.types(x.token_types if x.token_types is not None else torch.zeros_like(x.token_ids))
        if self.positions is not None:
            h = h + self.positions(x.positions + self.cfg.first_position)
        h = self.norm(h)
        angles = [rotary(x.positions) for rotary in self.rotaries]
        for layer, window in zip(self.layers, self.cfg.windows, strict=True):
            h = layer(h, angles[window is not None and len(angles) > 1] if angles else None, x)
        return self.final_norm(h)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Scores of classes, or the hidden states as they are. [S, D] -> [S, size]."""
        for i, linear in enumerate(self.head):
            hidden = linear(hidden)
            if i < len(self.head) - 1:
                hidden = self.head_norm(self.head_act(hidden))
        return hidden

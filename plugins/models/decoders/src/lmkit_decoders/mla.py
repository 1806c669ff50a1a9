"""Multi-head latent attention (https://arxiv.org/abs/2405.04434); what is cached are the latents."""

from __future__ import annotations

from typing import cast

import torch
from lmkit.api import BuildContext, CannotSplit, StepInputs
from lmkit_layers.attention import grow
from lmkit_layers.latent import Latent
from lmkit_layers.linear import Linear
from lmkit_layers.norm import Norm
from torch import Tensor, nn

from lmkit_decoders.describe import DecoderConfig
from lmkit_decoders.mlp import Specs

Angles = tuple[Tensor, Tensor]


class LatentAttention(nn.Module):
    """hidden [T, D] -> [T, D]. Queries, and keys with values, come out of narrow latents.

    A part of each head is turned; that part of the keys is the same in all heads. The cache holds it behind the latent
    of keys and values: queries are multiplied by what would make keys of latents, what they read is made values.
    """

    def __init__(self, cfg: DecoderConfig, layer: int, specs: Specs, ctx: BuildContext) -> None:
        super().__init__()
        assert cfg.mla is not None
        if cfg.num_q_heads % ctx.tp_size:
            raise CannotSplit(f"{cfg.num_q_heads} heads cannot be split over {ctx.tp_size} ranks")
        self.mla, self.interleaved, self.rows = cfg.mla, cfg.interleaved, ctx.rows
        self.heads, self.growth = cfg.num_q_heads // ctx.tp_size, cfg.query_growth
        path = f"layers.{layer}.attn"
        self.q_a = ctx.linear(specs[f"{path}.q_a"]) if self.mla.q_rank else None
        self.q_a_norm = cast("Norm", ctx.norm(self.mla.q_rank, self.mla.norm_eps)) if self.mla.q_rank else None
        self.q_b = ctx.linear(specs[f"{path}.q_b"])
        self.kv_a = ctx.linear(specs[f"{path}.kv_a"])
        self.kv_a_norm = cast("Norm", ctx.norm(self.mla.kv_rank, self.mla.norm_eps))
        self.kv_b = ctx.linear(specs[f"{path}.kv_b"])
        self.latent = Latent(cast("Linear", self.kv_b), self.mla.plain, self.mla.value)
        self.o = ctx.linear(specs[f"{path}.o"])
        self.attn = ctx.attention(layer, scale=cfg.attn_scale or cfg.head_dim**-0.5)

    def forward(self, h: Tensor, angles: Angles | None, x: StepInputs) -> Tensor:
        mla, num = self.mla, h.shape[0]
        narrow = h if self.q_a is None or self.q_a_norm is None else self.q_a_norm(self.q_a(h))
        q = self.q_b(narrow).view(num, self.heads, -1)
        latent, turned = self.kv_a(h).split((mla.kv_rank, mla.turned), dim=-1)
        turned = turned[:, None]
        if angles is not None:
            self.rows.rotate(q[..., mla.plain :], *angles, self.interleaved)
            self.rows.rotate(turned, *angles, self.interleaved)
        if self.growth is not None:
            grow(q, x.positions, *self.growth)
        q = torch.cat((self.latent(q[..., : mla.plain], "keys"), q[..., mla.plain :]), dim=-1)
        k = torch.cat((self.kv_a_norm(latent)[:, None], turned), dim=-1)
        read = self.attn(q, k, k[..., : mla.kv_rank], x).view(num, self.heads, -1)
        return self.o(self.latent(read, "values").flatten(1))

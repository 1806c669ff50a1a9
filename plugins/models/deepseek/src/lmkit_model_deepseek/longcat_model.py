"""LongCat Flash: mixtures beside pairs of layers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

import torch
from lmkit.api import ModelInfo, StepInputs
from lmkit_decoders import Decoder, DecoderLayer, LatentAttention
from lmkit_layers import Router
from torch import Tensor, nn


class ScaledNorm(nn.Module):
    """A norm whose result is multiplied by a number."""

    def __init__(self, norm: nn.Module, scale: float) -> None:
        super().__init__()
        self.norm, self.scale = norm, scale

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x) * self.scale


class Mixture(nn.Module):
    """Routed experts, of which the last `idle` give back what they read: [T, D] -> [T, D]."""

    def __init__(self, cfg: Any, path: str, specs: Any, ctx: Any) -> None:
        super().__init__()
        idle, self.num = ctx.info.config["options"]["idle"], cfg.moe.num_experts
        corrected, sizes = cfg.moe.correction, (self.num + idle, cfg.hidden_size)
        self.router = Router(cfg.moe, *sizes, ctx.dtype, ctx.rows, correction=corrected)
        self.experts = ctx.experts(specs[f"{path}.experts.up"], specs[f"{path}.experts.down"], cfg.activation)

    def forward(self, h: Tensor) -> Tensor:
        ids, weights = self.router(h)
        idle = ids >= self.num
        kept = (weights * idle).sum(-1, keepdim=True)
        # what the first expert says in their place counts nothing
        return self.experts(h, ids.masked_fill(idle, 0), weights.masked_fill(idle, 0.0)) + h * kept.to(h.dtype)


class LongcatModel(Decoder):
    def __init__(self, info: ModelInfo, ctx: Any) -> None:
        super().__init__(info, ctx)
        specs = {spec.name: spec for spec in info.linears}
        num = len(info.layers) // 2
        self.mixtures = nn.ModuleList(Mixture(self.cfg, f"mixtures.{n}", specs, ctx) for n in range(num))

    def make_attention(self, i: int, specs: Any, ctx: Any) -> nn.Module:
        attn = cast("LatentAttention", super().make_attention(i, specs, ctx))
        attn.kv_a_norm = ScaledNorm(attn.kv_a_norm, ctx.info.config["options"]["kv_scale"])
        return attn

    @torch.inference_mode()
    def forward(self, x: StepInputs) -> Tensor:
        h = self.embeddings(x)
        angles, delta, shortcut = self.rotary[0](x.positions), None, h
        for i, layer in enumerate(cast("Iterable[DecoderLayer]", self.layers)):
            h, mixed, shortcut = self.read(i, x, *layer.mix(h, delta, angles, x), shortcut)
            normed = layer.mlp_norm.add(h, mixed)
            delta = layer.mlp(normed)
            if i % 2 == 0:
                shortcut = self.mixtures[i // 2](normed)
            else:
                delta = delta + shortcut
        return self.norm.add(h, delta)

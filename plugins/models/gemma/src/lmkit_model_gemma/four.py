"""Gemma 4 (text): per-layer inputs, a scale of each layer, and experts beside the MLP."""

from __future__ import annotations

from typing import Any

import torch
from lmkit.api import RowOps, StepInputs
from lmkit_decoders import Decoder, MoE
from lmkit_decoders.decoder import SandwichLayer
from lmkit_layers import Router
from torch import Tensor, nn

from lmkit_model_gemma.per_layer import PerLayerBlock, PerLayerInputs, ValueNormAttention
from lmkit_model_gemma.small_config import SmallGemmaConfig


class GemmaRouter(Router):
    """Scales of its input and of each expert's weight."""

    def __init__(
        self, routing: Any, num_experts: int, hidden_size: int, dtype: torch.dtype, rows: RowOps, **parts: bool
    ) -> None:
        super().__init__(routing, num_experts, hidden_size, dtype, rows, **parts)
        self.scale = nn.Parameter(torch.empty(hidden_size, dtype=dtype), requires_grad=False)
        self.per_expert_scale = nn.Parameter(torch.empty(num_experts, dtype=dtype), requires_grad=False)

    def forward(self, h: Tensor) -> tuple[Tensor, Tensor]:
        ids, weights = super().forward(h * self.scale * h.shape[1] ** -0.5)
        return ids, weights * self.per_expert_scale[ids]


class GemmaExperts(MoE):
    """Experts and the MLP have norms of their own; experts read the residual stream `h`, the MLP its norm `y`."""

    router_class = GemmaRouter

    def __init__(self, cfg: Any, path: str, specs: Any, ctx: Any) -> None:
        super().__init__(cfg, path, specs, ctx)
        for name in ("shared_post_norm", "experts_post_norm", "experts_norm"):
            setattr(self, name, ctx.norm(cfg.hidden_size, cfg.norm_eps, cfg.norm))
        self.router_norm = ctx.norm(cfg.hidden_size, cfg.norm_eps, "rms_plain")

    def forward(self, y: Tensor, h: Tensor) -> Tensor:
        assert self.shared is not None
        ids, weights = self.router(self.router_norm(h))
        routed = self.experts(self.experts_norm(h), ids, weights)
        return self.experts_post_norm(routed) + self.shared_post_norm(self.shared(y))


class Gemma4Layer(SandwichLayer):
    """Around the residual stream `h` [T, D], which it changes; `vectors` [T, P], if any, are this layer's."""

    def __init__(self, cfg: Any, i: int, attn: nn.Module, mlp: nn.Module, specs: Any, ctx: Any) -> None:
        super().__init__(cfg, attn, mlp, ctx)
        self.per_layer = PerLayerBlock(cfg, i, specs, ctx) if ctx.info.config["options"] else None
        self.layer_scalar = nn.Parameter(torch.empty(1, dtype=ctx.dtype), requires_grad=False)
        self.sparse = isinstance(mlp, MoE)

    def change(self, h: Tensor, mixed: Tensor, *vectors: Tensor) -> None:
        y = self.mlp_norm.add(h, self.attn_post_norm(mixed))
        h.add_(self.mlp_post_norm(self.mlp(y, h) if self.sparse else self.mlp(y)))
        if self.per_layer is not None:
            h.add_(self.per_layer(h, *vectors))
        h.mul_(self.layer_scalar)


class Gemma4(Decoder):
    config = SmallGemmaConfig
    attention = ValueNormAttention
    moe = GemmaExperts

    def __init__(self, info: Any, ctx: Any) -> None:
        super().__init__(info, ctx)
        specs = {spec.name: spec for spec in info.linears}
        self.per_layer = PerLayerInputs(self.cfg, specs, ctx) if info.config["options"] else None

    def make_layer(self, i: int, specs: Any, ctx: Any) -> Gemma4Layer:
        attn, mlp = self.make_attention(i, specs, ctx), self.make_mlp(i, specs, ctx)
        return Gemma4Layer(self.cfg, i, attn, mlp, specs, ctx)

    @torch.inference_mode()
    def forward(self, x: StepInputs) -> Tensor:
        h = self.embeddings(x)
        vectors = self.per_layer(x.token_ids, h) if self.per_layer is not None else None
        angles = [rotary(x.positions) for rotary in self.rotary]
        for i, (layer, by) in enumerate(zip(self.layers, self.turned_by, strict=True)):
            mixed = layer.mix(h, None, None if by is None else angles[by], x)
            h, *rest = self.read(i, x, *mixed, *(() if vectors is None else (vectors[:, i],)))
            layer.change(h, *rest)
        return self.norm(h)

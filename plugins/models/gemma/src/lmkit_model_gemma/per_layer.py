"""What Gemma 3n and 4 share: a vector for each token and layer, and attention with normed values."""

from __future__ import annotations

from typing import Any

import torch
from lmkit.api import StepInputs
from lmkit_decoders import SelfAttention
from lmkit_decoders.decoder import Angles
from torch import Tensor, nn


class ValueNormAttention(SelfAttention):
    """Values are normed like keys, without a weight; some layers read keys and values of others, or values are keys."""

    def __init__(self, cfg: Any, layer: int, specs: Any, ctx: Any) -> None:
        super().__init__(cfg, layer, specs, ctx)
        if cfg.kv_of is not None:
            self.num_kv, self.k_norm = 0, None
        self.k_is_v = cfg.k_is_v and self.num_kv > 0
        self.v_norm = ctx.norm(cfg.head_dim, cfg.norm_eps, "rms_plain") if self.num_kv else None

    def prepare(self, qkv: Tensor, angles: Angles | None, x: StepInputs) -> tuple[Tensor, Tensor, Tensor]:
        if self.k_is_v:
            qkv = torch.cat((qkv, qkv[:, self.num_q :]), dim=1)
        q, k, v = super().prepare(qkv, angles, x)
        return q, k, v if self.v_norm is None else self.v_norm(v)


class PerLayerInputs(nn.Module):
    """token ids [T], their embeddings [T, D] -> [T, layers, P]: from a table, and projected from the embedding."""

    def __init__(self, cfg: Any, specs: Any, ctx: Any) -> None:
        super().__init__()
        options = ctx.info.config["options"]
        self.size, self.rows = options["per_layer"], options["per_layer_rows"]
        self.embed = ctx.embedding(self.rows, len(cfg.windows) * self.size)
        self.projection = ctx.linear(specs["per_layer.projection"])
        self.norm = ctx.norm(self.size, cfg.norm_eps, cfg.norm)

    def forward(self, ids: Tensor, h: Tensor) -> Tensor:
        projected = self.norm((self.projection(h) * h.shape[1] ** -0.5).unflatten(1, (-1, self.size)))
        known = torch.where(ids < self.rows, ids, 0)  # tokens beyond the table, of other media, have the first row
        found = self.embed(known).unflatten(1, (-1, self.size)) * self.size**0.5
        return (projected + found) * 2**-0.5


class PerLayerBlock(nn.Module):
    """What a layer makes of its vectors [T, P]: gated by the stream [T, D] -> [T, D]."""

    def __init__(self, cfg: Any, layer: int, specs: Any, ctx: Any) -> None:
        super().__init__()
        self.gate, self.out = (ctx.linear(specs[f"layers.{layer}.per_layer.{name}"]) for name in ("gate", "out"))
        self.norm = ctx.norm(cfg.hidden_size, cfg.norm_eps, cfg.norm)
        self.act, self.rows = cfg.activation, ctx.rows

    def forward(self, h: Tensor, vectors: Tensor) -> Tensor:
        return self.norm(self.out(self.rows.activate(self.gate(h), self.act) * vectors))

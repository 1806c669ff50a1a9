"""Step 3.5: heads with a gate, and gates of MLPs and experts that are limited in some layers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import torch.nn.functional as F
from lmkit_decoders import Decoder, MoE, SelfAttention
from torch import Tensor, nn

LIMITED = "silu_limited"  # a name that only these rows know: no kernel for experts takes it for another


class LimitedRows:
    """The operators of rows, of which `gate` is min(silu(first), limit) * clamp(second, -limit, limit)."""

    def __init__(self, rows: Any, limit: float) -> None:
        self.rows, self.limit = rows, limit

    def __getattr__(self, name: str) -> Any:
        return getattr(self.rows, name)

    def gate(self, x: Tensor, name: str) -> Tensor:
        gate, up = x.float().chunk(2, dim=-1)
        return (F.silu(gate).clamp(max=self.limit) * up.clamp(-self.limit, self.limit)).to(x.dtype)


class GatedHeads(SelfAttention):
    """What each head gives is multiplied by the sigmoid of a number of its own."""

    def __init__(self, cfg: Any, layer: int, specs: Any, ctx: Any) -> None:
        super().__init__(cfg, layer, specs, ctx)
        self.gate = ctx.linear(specs[f"layers.{layer}.attn.gate"])

    def output(self, y: Tensor, h: Tensor) -> Tensor:
        assert self.gate is not None
        gates = self.gate(h).sigmoid()
        return self.o((y.unflatten(-1, (self.num_q, self.head_dim)) * gates[..., None]).flatten(1))


class StepModel(Decoder):
    attention = GatedHeads

    def make_mlp(self, i: int, specs: Any, ctx: Any) -> nn.Module:
        given = ctx.info.config["options"]
        limit, shared = given["limits"][i], given["shared_limits"][i]
        cfg = self.cfg.at(i)
        if not self.cfg.sparse(i):
            mlp: Any = super().make_mlp(i, specs, ctx)
            if shared:
                mlp.rows = LimitedRows(mlp.rows, shared)
            return cast("nn.Module", mlp)
        if limit and cfg.moe is not None:
            cfg = replace(cfg, moe=replace(cfg.moe, activation=LIMITED))
        moe: Any = MoE(cfg, f"layers.{i}.mlp", specs, ctx)
        if limit:
            moe.experts.rows = LimitedRows(ctx.rows, limit)
        if shared:
            moe.shared.rows = LimitedRows(ctx.rows, shared)
        return cast("nn.Module", moe)

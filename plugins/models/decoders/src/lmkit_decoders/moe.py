"""The mixture of experts that takes the place of an MLP."""

from __future__ import annotations

from typing import cast

import torch
from lmkit.api import BuildContext
from lmkit.layers.experts import Experts, Mixture, Router
from torch import Tensor, nn

from lmkit_decoders.describe import DecoderConfig, MoEConfig
from lmkit_decoders.mlp import MLP, GatedMLP, Specs


class MoE(Mixture):
    """Routed experts, and a shared one that sees every token."""

    router_class: type[Router] = Router

    def __init__(self, cfg: DecoderConfig, path: str, specs: Specs, ctx: BuildContext) -> None:
        super().__init__()
        moe, self.rows = cfg.moe, ctx.rows
        assert moe is not None
        self.router = make_router(self.router_class, moe, cfg.hidden_size, ctx)
        up, down = specs[f"{path}.experts.up"], specs[f"{path}.experts.down"]
        self.experts = cast("Experts", ctx.experts(up, down, moe.activation or cfg.activation))
        shared: type[nn.Module] = GatedMLP if cfg.gated else MLP
        self.shared = shared(cfg, f"{path}.shared", specs, ctx) if moe.shared_size else None
        self.latent_in, self.latent_out = (
            ctx.linear(specs[f"{path}.latent_{side}"]) if moe.latent else nn.Identity() for side in ("in", "out")
        )
        gate = torch.empty(1, cfg.hidden_size, dtype=ctx.dtype)
        self.shared_gate = nn.Parameter(gate, requires_grad=False) if moe.shared_gate else None

    def forward(self, h: Tensor) -> Tensor:
        ids, weights = self.router(h)
        out = self.latent_out(self.experts(self.latent_in(h), ids, weights))
        if self.shared is None:
            return out
        return self.rows.add(out, self.shared(h), h, self.shared_gate)


def make_router(kind: type[Router], moe: MoEConfig, hidden_size: int, ctx: BuildContext, idle: int = 0) -> Router:
    """A router of that kind; it may also choose `idle` numbers after those of the experts."""
    num, parts = moe.num_experts + idle, {"bias": moe.router_bias, "correction": moe.correction}
    return kind(moe, num, hidden_size, ctx.dtype, ctx.rows, **parts)

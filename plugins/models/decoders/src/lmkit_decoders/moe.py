"""The mixture of experts that takes the place of an MLP."""

from __future__ import annotations

from typing import cast

from lmkit.api import BuildContext
from lmkit_layers.experts import Experts, Mixture, Router
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
        self.router = self.make_router(moe, cfg.hidden_size, ctx)
        up, down = specs[f"{path}.experts.up"], specs[f"{path}.experts.down"]
        self.experts = cast("Experts", ctx.experts(up, down, moe.activation or cfg.activation))
        self.shared_gate = None
        shared: type[nn.Module] = GatedMLP if cfg.gated else MLP
        self.shared = shared(cfg, f"{path}.shared", specs, ctx) if moe.shared_size else None

    def make_router(self, moe: MoEConfig, hidden_size: int, ctx: BuildContext) -> Router:
        return self.router_class(moe, moe.num_experts, hidden_size, ctx.dtype, ctx.rows, correction=moe.correction)

    def forward(self, h: Tensor) -> Tensor:
        ids, weights = self.router(h)
        return self.with_shared(self.experts(h, ids, weights), h)

    def with_shared(self, routed: Tensor, h: Tensor) -> Tensor:
        """What the routed experts and the shared one say of `h` [T, D]; changes `routed`."""
        return routed if self.shared is None else self.rows.add(routed, self.shared(h), h, self.shared_gate)
